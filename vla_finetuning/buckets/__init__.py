"""Files in object stores, and local copies of folders in them."""
