"""Stores around a store: what the inner one keeps is sealed, or packed."""

from perdure.stores.wrapped.compressed import CompressedStore as CompressedStore
from perdure.stores.wrapped.encrypted import EncryptedStore as EncryptedStore
from perdure.stores.wrapped.keys import MasterKeys as MasterKeys

__all__ = ["CompressedStore", "EncryptedStore", "MasterKeys"]
