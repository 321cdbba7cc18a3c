"""Names of the columns of a batch that are not features. Imports nothing."""

# With --dataset.on_error=skip: true for rows that could not be read.
IS_SKIPPED = "is_skipped"
# Columns that identify a row and its position in a run's stream. They stay on the host.
ROW_COLUMNS = ("dataset_index", "index", "position", IS_SKIPPED)
# The instruction in UTF-8, for policies whose forward reads text. Stays on the host.
TASK_BYTES = "task_bytes"
HOST_COLUMNS = (*ROW_COLUMNS, TASK_BYTES)
# The return of a frame, for a value function to learn.
RETURN = "return"
# Suffix of a camera's key: false for rows of robots without the camera; and the mask of the robot's action dimensions.
IS_PRESENT, ACTION_DIMS = "_is_present", "action_dims"
# The text of the current subtask, if a dataset or an environment has it.
SUBTASK = "subtask"
# Index of a row's robot in a mixture.
ROBOT = "robot_index"
# A copy of the position on the device, as a seed of random numbers.
STREAM_POSITION = "stream_position"
