"""Stores that wrap a store: encryption and compression of everything that the inner store keeps."""

from perdure.stores.wrapped.compressed import CompressedStore as CompressedStore
from perdure.stores.wrapped.encrypted import EncryptedStore as EncryptedStore
from perdure.stores.wrapped.keys import MasterKeys as MasterKeys

__all__ = ["CompressedStore", "EncryptedStore", "MasterKeys"]
