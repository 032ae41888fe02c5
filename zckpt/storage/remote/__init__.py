"""Files of stores: S3, web servers, WebDAV, SFTP, and what else fsspec knows (Google's, Azure's, Hugging Face, ...).

    addresses   URLs, and what of them is shown
    attempts    which failures pass, and how long to wait
    stores      what every store does: s3, web, fsspec_stores; schemes says which one a URL means
    uploads     files on their way into a store: those of s3 in parts, others under temporary names (named_uploads)
    cache       few requests: blocks of what is small, large ranges at once of what is known to be needed
    mount       a place as a tree of names and sizes, on which all that reads checkpoints works

Everything heavy is loaded when the first URL is opened.
"""

from __future__ import annotations

from zckpt.storage.remote.addresses import is_url

__all__ = ["is_url"]
