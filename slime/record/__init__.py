"""The record of a run: one SQLite file with every prompt, response, reward and decision."""

from slime.record.ledger_rows import LedgerReader
from slime.record.place import record_file
from slime.record.reader import Kind, Record, RecordedSample, Select, open_record
from slime.record.samples import Entry, group_entries
from slime.record.schema import RECORD_FILE, RecordError
from slime.record.writer import RecordWriter

Answer = RecordedSample  # its former name, which users import

__all__ = [
    "RECORD_FILE",
    "Answer",
    "Entry",
    "Kind",
    "LedgerReader",
    "Record",
    "RecordError",
    "RecordWriter",
    "RecordedSample",
    "Select",
    "group_entries",
    "open_record",
    "record_file",
]
