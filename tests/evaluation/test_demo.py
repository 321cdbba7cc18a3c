"""What the demo says of its policy in the loop."""

from vla_finetuning.evaluation.demo import success_table


def test_the_table_counts_what_was_played_and_says_what_was_not():
    scores = {
        "trained": {"successes": 3, "episodes": 4, "errors": 1},
        "other_instruction": {"successes": 0, "episodes": 5, "went_where_told": 4},
    }
    _, trained, other = success_table(scores).splitlines()
    assert "3 of 4, 75.0 % (30.1 to 95.4); 1 more ended in an error" in trained
    assert other.startswith("  trained, told the other instruction  0 of 5, 0.0 % (0.0 to 43.4); ")
    assert other.endswith("; 4 went to the bin they were told")
