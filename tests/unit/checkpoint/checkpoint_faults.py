"""Small contents to save, by the names the tests of this folder use."""

from headway.testing.contents import Counter, TiedModel, make_contents, train

__all__ = ["Counter", "TiedModel", "make_contents", "train"]
