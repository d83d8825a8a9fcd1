from .running import run as run
from .running import without_record as without_record
