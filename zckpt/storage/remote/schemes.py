"""Which store a URL's scheme means, and how files get into it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from zckpt.errors import TargetError
from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.stores import Store

if TYPE_CHECKING:
    from zckpt.storage.remote.named_uploads import NamedUploads
    from zckpt.storage.remote.s3 import S3Uploads

    Uploads: TypeAlias = S3Uploads | NamedUploads

_STORES = {
    "s3": "s3:S3Store", "s3a": "s3:S3Store", "http": "web:HttpStore", "https": "web:HttpStore",
    "webdav": "web:WebdavStore", "webdavs": "web:WebdavStore", "dav": "web:WebdavStore", "davs": "web:WebdavStore",
    "sftp": "fsspec_stores:SftpStore", "ssh": "fsspec_stores:SftpStore",
}  # fmt: skip
"""Module and class of the schemes whose stores have their own."""


def store_of(address: Address) -> Store:
    """Open the store of an address.

    Raises UsageError: there is no such scheme; MissingPackageError: the package for it is not installed.
    """
    module, _, name = _STORES.get(address.scheme, "fsspec_stores:FsspecStore").partition(":")
    found: type[Store] = getattr(import_module(f"zckpt.storage.remote.{module}"), name)
    return found(address)


def uploads_of(store: Store, key: str, *, is_directory: bool) -> Uploads:
    """Return how the files of a target get into a store.

    Raises TargetError: nothing can be written there.
    """
    from zckpt.storage.remote.fsspec_stores import FsspecStore
    from zckpt.storage.remote.named_uploads import NamedUploads
    from zckpt.storage.remote.s3 import S3Store, S3Uploads

    if isinstance(store, S3Store):
        return S3Uploads(store, key, is_directory=is_directory)
    if isinstance(store, FsspecStore):
        return NamedUploads(store, key, is_directory=is_directory)
    raise TargetError("cannot be written", path=store.address.shown, found="a web server, which is read-only",
                      advice="write to a store: S3, SFTP, WebDAV, ...")  # fmt: skip
