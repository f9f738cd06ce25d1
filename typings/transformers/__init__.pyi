# A type checker would read some three thousand files to find the types of a few names: here they are all Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
