"""Search in your own documents by BM25 (`slime-rl[search]` installs bm25s)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from slime.agent.tools.registry import ToolError


class Corpus:
    """Documents and their index; the method `search` is the tool. Episodes can share one.

    Example: `ToolSet([Corpus(["Rome is in Italy.", "Oslo is in Norway."]).search])`.
    """

    repeatable = survives = True

    def __init__(self, documents: Sequence[str]):
        if not documents:
            raise ValueError("a corpus needs at least one document")
        try:
            import bm25s  # an extra, which most runs do without
        except ImportError:
            raise ImportError(
                "the search tool needs the package bm25s: pip install 'slime-rl[search]'"
            ) from None
        self.documents = list(documents)
        self._tokenize = lambda text: bm25s.tokenize(text, stopwords="en", show_progress=False)
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokenize(self.documents), show_progress=False)

    def find(self, query: str, num_results: int = 3) -> list[tuple[int, float]]:
        """Return (number of a document, score), best first, for documents with a word of the query."""
        most = min(num_results, len(self.documents))
        found, scores = self._index.retrieve(self._tokenize(query), k=most, show_progress=False)
        pairs = zip(found[0], scores[0], strict=True)
        return [(int(number), float(score)) for number, score in pairs if score > 0]

    def search(self, query: Annotated[str, "words to look for"], num_results: int = 3) -> str:
        """Documents that fit a query best."""
        if not 1 <= num_results <= 20:
            raise ToolError(f"num_results is {num_results}; choose 1 to 20")
        found = self.find(query, num_results)
        lines = [f"[{place}] {self.documents[number]}" for place, (number, _) in enumerate(found, 1)]
        return "\n".join(lines) or "nothing found; try other words"
