"""Refuse addresses with credentials in them."""

from __future__ import annotations

import re

# Match USER:SECRET@ in scheme://USER:SECRET@HOST. Keys of object stores contain slashes, so a secret may span several
# path segments. Exclude a port after the colon, and a bucket that is named by an ARN.
_CREDENTIALS = re.compile(r"""://(?:[^/@,\s"']*@|(?!arn:)[^/@:,\s"']*:(?!\d{1,5}(?:[/,\s"']|$))[^@\s"']*@)""")
# Azure addresses have a container's name before the @.
_NAMED = re.compile(r"""\b(?:abfss?|wasbs?)://[\w$-]+@""")


def refuse_credentials(text: str, label: str) -> None:
    """Refuse a text that contains an address with credentials; the error names only `label`.

    Addresses are printed, saved in the run's folder, sent to trackers and named in errors.
    """
    if _CREDENTIALS.search(_NAMED.sub("", text)):
        raise ValueError(
            f"{label}: an address with credentials in it (SCHEME://KEY:SECRET@...) is refused, and not repeated here, "
            "because addresses are shown, logged and saved; give SCHEME://BUCKET/PATH, and the credentials in the "
            "environment or the store's own configuration files, on every node (S3: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials; Google: GOOGLE_APPLICATION_CREDENTIALS)"
        )
