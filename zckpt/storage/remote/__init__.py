"""Files of stores that fsspec knows: S3, Google's and Azure's, web servers, SFTP, WebDAV, Hugging Face.

    addresses   URLs, and what of them is shown
    attempts    which failures pass, and how long to wait
    schemes     which store a URL means: stores, s3, web, sftp: what there is, and ranges of bytes of it
    cache       few requests: blocks of what is small, large ranges at once of what is known to be needed
    mount       a place as a tree of names and sizes, on which all that reads checkpoints works

Everything heavy is loaded when the first URL is opened.
"""

from __future__ import annotations

from zckpt.storage.remote.addresses import is_url

__all__ = ["is_url"]
