"""Refuse addresses with credentials in them."""

from __future__ import annotations

import re

# What comes before the @ of scheme://USER:SECRET@place. Keys of object stores have slashes in them, so a secret may
# reach past the first one; after a colon there may be a port instead, and a bucket may go by an ARN.
_CREDENTIALS = re.compile(r"""://(?:[^/@,\s"']*@|(?!arn:)[^/@:,\s"']*:(?!\d{1,5}(?:[/,\s"']|$))[^@\s"']*@)""")
# Where a name before the @ is a part of the address: Azure's containers.
_NAMED = re.compile(r"""\b(?:abfss?|wasbs?)://[\w$-]+@""")


def refuse_credentials(text: str, label: str) -> None:
    """Raises ValueError when an address with credentials is in `text`, naming only `label`: it must not be shown.

    What is given as a root is printed, saved in the run's folder, sent to trackers and named in errors.
    """
    if _CREDENTIALS.search(_NAMED.sub("", text)):
        raise ValueError(
            f"{label}: an address with credentials in it (SCHEME://KEY:SECRET@...) is refused, and not repeated here, "
            "because addresses are shown, logged and saved; give SCHEME://BUCKET/PATH, and the credentials in the "
            "environment or the store's own configuration files, on every node (S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials; Google: GOOGLE_APPLICATION_CREDENTIALS)"
        )
