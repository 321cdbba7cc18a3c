"""Golden runs: small trainings whose losses, weights and row logs must equal another revision's, bit for bit.

    make golden                                the working tree against HEAD, or HEAD against HEAD~1
    make golden ARGS="--against main --only pi05_full,act"
    make golden ARGS="--record FILE"           only write down what this tree computes

Bits are comparable on one kind of CPU with one set of libraries only, so nothing is stored in the repository: the other
revision's record is made on this machine, in a temporary worktree, and cached in `.cache/golden`.
"""
