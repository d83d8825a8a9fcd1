"""The traces of the ETH evaluation module: a table of the devices in use."""

from __future__ import annotations

from typing import Final, final

from variable_batch_size.lab.cluster.readers.base import Reader, ReaderOptions, Rows, Text, split_cells

COUNTS: Final = ("GPUs", "TPU_cores")


@final
class EthReader(Reader):
    """`,Time,GPUs` or `,Time,TPU_cores`: an index, Unix seconds and the devices in use, a row for each sample.

    The trace begins at the first row and ends at the last one. Times may have fractions; they count to the microsecond,
    because float64 represents seconds since 1970 to a quarter of one. The index is not read. What the trace counts are
    devices. A file with both columns does not say which one is meant, so it raises.

    Source: `github.com/eth-easl/elastic-learning-rate-evaluation` (André, Strati and Klimovic, DistributedML 2022).
    """

    name = "eth"
    example = ",Time,GPUs"
    begins_at_first_row = True

    def recognizes(self, text: Text) -> bool:
        """Return whether the header has an index without a name, `Time` and nothing but columns of devices."""
        header = split_cells(text.lines[0][1])
        return header[:2] == ["", "Time"] and len(header) > 2 and set(header[2:]) <= set(COUNTS)

    def read(self, text: Text, options: ReaderOptions) -> Rows:
        """Return the time and the number of devices of each row. The times have to be in ascending order."""
        line, header = text.lines[0]
        if not self.recognizes(text) or len(split_cells(header)) != 3:
            requirement = "the header must be ,Time,GPUs or ,Time,TPU_cores"
            raise text.error(line, requirement, header, "keep one of the columns")
        if len(text.lines) == 1:
            raise text.error(line, "there must be at least one row", header, "add rows")
        times: list[float] = []
        devices: list[int] = []
        for line, row in text.lines[1:]:
            _, time, count = text.cells(line, row, header)
            times.append(text.cell(line, "Time", time))
            text.check_order(line, "Time", times)
            devices.append(int(text.cell(line, split_cells(header)[2], count, whole=True)))
        return Rows(times, devices)
