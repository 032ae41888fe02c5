"""Files of stores: S3, web servers, WebDAV, SFTP, and what else fsspec knows (Google's, Azure's, Hugging Face, ...).

    addresses   URLs, and what of them is shown
    attempts    which failures pass, and how long to wait
    stores      what every store does, for files of it and on their way into it: s3 sends parts, others send files
                under temporary names (web, fsspec_stores, named_uploads); schemes says which one a URL means
    cache       few requests: blocks of what is small, large ranges at once of what is known to be needed
    mount       a place as a tree of names and sizes, on which all that reads checkpoints works

Everything heavy is loaded when the first URL is opened.
"""

from __future__ import annotations

from zckpt.storage.remote.addresses import is_url

__all__ = ["is_url"]
