"""The events that TensorBoard reads."""

import struct

from tensorboardX.proto.event_pb2 import Event


def events(folder):
    """Read TensorBoard's files: each record is a length, its checksum, the event and its checksum."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack("<Q", data[start : start + 8])
            found.append(Event.FromString(data[start + 12 : start + 12 + length]))
            start += length + 16
    return found
