from pathlib import Path

RESULTS = Path(__file__).parent / "results"  # committed: what was measured, on which hardware, by which command
