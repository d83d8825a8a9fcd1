from .capacity_trace import CapacityTrace as CapacityTrace
from .public import PUBLIC as PUBLIC
from .public import fetch as fetch
from .readers.base import LogError as LogError
from .reading import read as read
from .synthesis import synthetic as synthetic
