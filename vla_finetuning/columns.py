"""Names of the columns that identify a batch's rows. Imports nothing."""

# Added by a read that may skip rows: true for those that could not be read.
IS_SKIPPED = "is_skipped"
# Added where features of frames are cached: which cameras' are not there, (B, cameras).
FEATURES_MISSING = "features_missing"
# What tells a row from all others and where it is in a run's stream. They stay on the host.
ROW_COLUMNS = ("dataset_index", "index", "position", IS_SKIPPED, FEATURES_MISSING)
# The instruction in UTF-8, for policies whose forward reads text. It stays on the host too.
TASK_BYTES = "task_bytes"
HOST_COLUMNS = (*ROW_COLUMNS, TASK_BYTES)
# What a frame is worth, for a value function to learn.
RETURN = "return"
# After a camera's key: false for rows of robots that lack it. Of actions: which dimensions are the row's robot's.
IS_PRESENT, ACTION_DIMS = "_is_present", "action_dims"
# What the robot is at, a text, where a dataset or an environment says so.
SUBTASK = "subtask"
# Which of a mixture's robots a row is of, by number; -1: of none, as the row has no action.
ROBOT = "robot_index"
# The position once more, for those that draw random numbers by it on the device.
STREAM_POSITION = "stream_position"
