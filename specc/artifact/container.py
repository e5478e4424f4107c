"""The file of a package: a zip archive of one canonical layout, written as a stream and read strictly.

Any unzip program can list and extract it. The reader accepts nothing but what the writer makes: entries one
after the other, stored and never compressed, no comments, fixed dates, contents aligned for memory mapping.
It rebuilds every header from names, sizes and checksums and compares, so no byte between the contents is
free to differ, and archives with links, duplicate names, paths that climb out, or more content than their
size, cannot be expressed.
"""

from __future__ import annotations

import mmap
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from specc.errors import ArtifactError

ALIGNMENT = 64  # bytes; contents begin at multiples, so that tensors of every dtype can be mapped
MAX_ENTRIES = 4096
NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9]+)*(/[a-z0-9_]+(\.[a-z0-9]+)*)*")

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_END_SIZE = _END64.size + _LOCATOR.size + _END.size
_VERSION = 45  # of the zip format: sizes of 64 bits
_DATE = 0x21  # 1 January 1980, the first that zip can say
_IN_EXTRA = 0xFFFFFFFF  # "the size is in the 64-bit field"
_SIZES, _PADDING = 0x0001, 0xD935  # ids of extra fields: 64-bit sizes, alignment


@dataclass(frozen=True)
class Entry:
    """One file inside the archive: where its content lies and its checksum."""

    name: str
    begin: int  # of the header
    offset: int  # of the content
    size: int
    crc: int


def _local(entry: Entry) -> bytes:
    extra = struct.pack("<2H2Q", _SIZES, 16, entry.size, entry.size)
    name = entry.name.encode("ascii")
    fixed = entry.begin + _LOCAL.size + len(name) + len(extra) + 6
    fill = -fixed % ALIGNMENT
    extra += struct.pack("<3H", _PADDING, 2 + fill, ALIGNMENT) + bytes(fill)
    head = _LOCAL.pack(
        b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, entry.crc, _IN_EXTRA, _IN_EXTRA, len(name), len(extra)
    )
    return head + name + extra


def _central(entry: Entry) -> bytes:
    extra = struct.pack("<2H3Q", _SIZES, 24, entry.size, entry.size, entry.begin)
    name = entry.name.encode("ascii")
    head = _CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, entry.crc, _IN_EXTRA, _IN_EXTRA,
        len(name), len(extra), 0, 0, 0, 0, _IN_EXTRA,
    )  # fmt: skip
    return head + name + extra


def _end(count: int, size: int, begin: int) -> bytes:
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, begin)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)


class ContainerWriter:
    """Writes entries one after the other; `close` writes the directory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._entries: list[Entry] = []

    def add(self, name: str, content: Iterable[bytes | memoryview]) -> None:
        """Write one entry; ``content`` is read once, piece by piece."""
        if not NAME.fullmatch(name) or name in {e.name for e in self._entries}:
            raise ValueError(f"{name!r} is not a free name")
        begin = self._file.tell()
        blank = Entry(name, begin, 0, 0, 0)
        self._file.write(_local(blank))
        offset, size, crc = self._file.tell(), 0, 0
        for piece in content:
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            self._file.write(piece)
        entry = Entry(name, begin, offset, size, crc)
        end = self._file.tell()
        self._file.seek(begin)
        self._file.write(_local(entry))
        self._file.seek(end)
        self._entries.append(entry)

    def close(self) -> None:
        """Write the directory; the file is complete then."""
        begin = self._file.tell()
        directory = b"".join(_central(e) for e in self._entries)
        self._file.write(directory + _end(len(self._entries), len(directory), begin))


class Container:
    """A package file, mapped into memory; its structure was checked, its contents were not.

    The mapping is private: writing to a tensor on it changes this process's copy of the page and not the
    file.
    """

    def __init__(self, path: Path) -> None:
        """Open and check the structure of ``path``.

        Raises:
            ArtifactError: it is not a file of this layout; says where.
        """
        self.path = path
        if not path.is_file():
            raise ArtifactError(path, "file", "no file" if not path.exists() else "not a file", "a package")
        size = path.stat().st_size
        if size < _END_SIZE:
            raise ArtifactError(path, "file size", f"{size} bytes", f"at least {_END_SIZE}")
        with path.open("rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self.entries = {e.name: e for e in self._read()}
        except ArtifactError:
            self.map.close()
            raise

    def content(self, name: str) -> memoryview:
        """Return an entry's content, without copying it."""
        entry = self.entries[name]
        return memoryview(self.map)[entry.offset : entry.offset + entry.size]

    def check_crc(self, name: str) -> None:
        """Raise ArtifactError unless the content has the checksum in the directory."""
        found = zlib.crc32(self.content(name))
        if found != self.entries[name].crc:
            raise ArtifactError(
                self.path, f"checksum of {name}", f"{found:08x}", f"{self.entries[name].crc:08x}"
            )

    def _fault(self, field: str, found: object, expected: object) -> ArtifactError:
        return ArtifactError(self.path, field, found, expected)

    def _read(self) -> list[Entry]:
        size = len(self.map)
        if self.map[-_END.size :][:4] != b"PK\x05\x06":
            raise self._fault("end of the file", "no directory: truncated, or not a package", "a directory")
        end = self.map[size - _END_SIZE :]
        if end[:4] != b"PK\x06\x06":
            raise self._fault("directory", "another kind of zip archive", "one that specc wrote")
        *_, count, _, length, begin = _END64.unpack_from(end)
        if begin + length != size - _END_SIZE:
            raise self._fault("directory", f"{length} bytes at {begin}", f"an end at {size - _END_SIZE}")
        if count > MAX_ENTRIES or length > MAX_ENTRIES * 512:
            raise self._fault("directory", f"{count} entries, {length} bytes", f"at most {MAX_ENTRIES}")
        directory = self.map[begin : begin + length]
        entries = list(self._entries(directory))
        if len(entries) != count:
            raise self._fault("directory", f"{len(entries)} entries", count)
        position = 0
        for entry in entries:
            position = entry.offset + entry.size
        if position != begin:
            raise self._fault("directory", f"begins at {begin}", f"{position}, where the contents end")
        if end != _end(count, length, begin):
            raise self._fault("end of the file", "changed bytes", "what belongs to this directory")
        return entries

    def _entries(self, directory: bytes) -> Iterator[Entry]:
        at, position = 0, 0
        names: set[str] = set()
        while at < len(directory):
            if len(directory) - at < _CENTRAL.size or directory[at : at + 4] != b"PK\x01\x02":
                raise self._fault("directory", f"no entry at byte {at}", "an entry")
            values = _CENTRAL.unpack_from(directory, at)
            flags, method, crc, name_length, extra_length = (
                values[3],
                values[4],
                values[7],
                values[10],
                values[11],
            )
            attributes = values[15]
            raw = directory[at + _CENTRAL.size : at + _CENTRAL.size + name_length]
            name = raw.decode("ascii", "backslashreplace")
            extra = directory[at + _CENTRAL.size + name_length :][:extra_length]
            self._refuse(name, names, flags, method, attributes)
            names.add(name)
            if len(extra) != 28:
                raise self._fault(f"entry {name}", f"{len(extra)} bytes of sizes", 28)
            _, _, size, _, begin = struct.unpack("<2H3Q", extra)
            entry = self._place(Entry(name, begin, 0, size, crc), position)
            text = _central(entry)
            if directory[at : at + len(text)] != text:
                raise self._fault(f"entry {name}", "changed bytes in the directory", "what belongs to it")
            position = entry.offset + entry.size
            at += len(text)
            yield entry

    def _refuse(self, name: str, names: set[str], flags: int, method: int, attributes: int) -> None:
        if not NAME.fullmatch(name):
            raise self._fault("entry", f"the name {name[:80]!r}", "a plain relative path inside the package")
        if name in names:
            raise self._fault("entry", f"{name} twice", "every name once")
        if method or flags:
            raise self._fault(f"entry {name}", f"compression {method}, flags {flags}", "stored as it is")
        if attributes:
            raise self._fault(
                f"entry {name}", f"attributes {attributes:#x}, such as a link's", "a plain file"
            )

    def _place(self, entry: Entry, position: int) -> Entry:
        """Return the entry with its content's offset; its header must stand where the one before ends."""
        if entry.begin != position:
            raise self._fault(f"entry {entry.name}", f"begins at {entry.begin}", position)
        head = _local(entry)
        offset = position + len(head)
        if entry.size > len(self.map) - offset:
            raise self._fault(
                f"entry {entry.name}", f"{entry.size} bytes", f"{len(self.map) - offset} at most"
            )
        if self.map[position:offset] != head:
            raise self._fault(f"entry {entry.name}", "changed bytes in its header", "what the directory says")
        return Entry(entry.name, entry.begin, offset, entry.size, entry.crc)
