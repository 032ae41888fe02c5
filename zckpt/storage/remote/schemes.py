"""Which store a URL's scheme means."""

from __future__ import annotations

from importlib import import_module

from zckpt.errors import MissingPackageError
from zckpt.storage.remote.addresses import Address
from zckpt.storage.remote.stores import Store

_STORES = {
    "s3": "s3:S3Store", "s3a": "s3:S3Store", "http": "web:HttpStore", "https": "web:HttpStore",
    "webdav": "web:WebdavStore", "webdavs": "web:WebdavStore", "dav": "web:WebdavStore", "davs": "web:WebdavStore",
    "sftp": "sftp:SftpStore", "ssh": "sftp:SftpStore",
}  # fmt: skip
"""Module and class of the schemes whose stores have their own."""


def store_of(address: Address) -> Store:
    """Open the store of an address.

    Raises
    ------
    UsageError
        There is no such scheme.
    MissingPackageError
        The package for it is not installed.
    """
    try:
        import fsspec  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"{address.scheme}:// needs fsspec, which is not installed", advice="pip install 'zckpt[remote]'"
        ) from error
    if address.scheme not in _STORES:
        return Store(address)
    module, _, name = _STORES[address.scheme].partition(":")
    found: type[Store] = getattr(import_module(f"zckpt.storage.remote.{module}"), name)
    return found(address)
