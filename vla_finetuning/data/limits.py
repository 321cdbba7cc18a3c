"""Bound the size of a LeRobot dataset and its parts: files that declare more are refused before they are read.

A few hundred kilobytes can unpack into all the memory of a machine. Every limit is far above what robots record. Limits
apply to sizes that a header, a footer or the file system declares.
"""

from __future__ import annotations

# RGB frames and numbers of a row. Two of the largest sensors on the market, DCI 8K, take 212 MB; so do 34 cameras of
# 1080x1920, or 8 of 2160x3840. A read task holds 32 rows or more.
MAX_ROW_BYTES = 256 * 2**20

# info.json lists features, some 200 bytes each, and their dimensions' names; stats.json has ten or so statistics for
# each dimension. Both are a few kilobytes. Python's objects take up to 25 times the bytes of the text.
MAX_INFO_BYTES = 4 * 2**20
MAX_STATS_BYTES = 16 * 2**20

# Open X-Embodiment, the largest collection, has 2.4 million episodes; instructions are far fewer.
MAX_EPISODES = 5_000_000
# Unpacked columns of the tables of episodes and tasks: 200 bytes a row.
MAX_EPISODES_BYTES = MAX_EPISODES * 200
MAX_TASKS_BYTES = 1_000_000 * 200
# Characters of an instruction; a tokenizer cuts it after some hundred.
MAX_INSTRUCTION = 20_000
# A line of JSON in `meta/` of v2.0 and v2.1. An episode's statistics are 11 kB for DROID's 40 features.
MAX_LINE_BYTES = MAX_STATS_BYTES

# Unpacked row groups of a data file in one read. LeRobot's files have 100 MB, in one row group if its converter wrote
# them, and a robot's numbers compress ten to one at best.
MAX_DATA_BYTES = 2 * 2**30
# Columns of a file of labels (`value.py`), on the driver: 20 bytes a frame, and the name of the dataset's root.
MAX_LABELS_BYTES = 16 * MAX_DATA_BYTES
# A footer takes 210 bytes for each column of a row group. LeRobot writes a row group every ten episodes, of 120 columns
# with two cameras, and starts another file at 100 MB: 5000 row groups, 125 MB.
MAX_FOOTER_BYTES = 128 * 2**20
# Footers that a process caches, by their size in the files; in memory they take ten times as much.
KEPT_FOOTER_BYTES = 16 * 2**20
# Headers and the like beside the pixels of an encoded image.
IMAGE_OVERHEAD_BYTES = 64 * 2**10
