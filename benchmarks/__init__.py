from pathlib import Path

# Committed: what was measured, on which hardware, by which command.
RESULTS = Path(__file__).parent / "results"
