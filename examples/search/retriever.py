"""A retriever behind HTTP, with the interface of Search-R1's: BM25 over a corpus of passages.

    python examples/search/retriever.py --corpus runs/search/corpus.jsonl --port 8817

POST /retrieve {"queries": ["bezo home"], "topk": 2} answers
{"result": [[{"document": {"id": "7", "contents": "bezo home tavi"}, "score": 9.1}, ...]]}: for
each query the best passages, the best first; passages that share no word with it are left out. The
corpus is JSONL with `contents`, as that of Search-R1 is. Needs the extra `search` (bm25s).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bm25s
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MOST = 100  # passages of an answer


class Retriever:
    """BM25 (Lucene's variant, k1 1.5, b 0.75) over the words of the passages."""

    def __init__(self, passages: list[dict[str, Any]]) -> None:
        self.passages = passages
        self.index = bm25s.BM25()
        self.index.index(self.words([each["contents"] for each in passages]), show_progress=False)

    @staticmethod
    def words(texts: list[str]) -> Any:
        return bm25s.tokenize(texts, stopwords=None, show_progress=False)

    def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Returns at most `topk` passages for each query."""
        k = min(topk, len(self.passages))
        found = self.index.retrieve(
            bm25s.tokenize(queries, stopwords=None, show_progress=False, return_ids=False),
            k=k, show_progress=False, n_threads=1,
        )  # fmt: skip
        return [
            [
                {"document": self.passages[int(i)], "score": float(score)}
                for i, score in zip(numbers, scores, strict=True)
                if score > 0
            ]
            for numbers, scores in zip(found.documents, found.scores, strict=True)
        ]


def application(retriever: Retriever) -> Starlette:
    async def retrieve(request: Request) -> JSONResponse:
        asked = json.loads(await request.body())
        queries, topk = asked.get("queries"), asked.get("topk", 3)
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
            return JSONResponse({"error": "expected 'queries', a list of texts"}, 400)
        if not isinstance(topk, int) or not 0 < topk <= MOST:
            return JSONResponse({"error": f"expected 'topk' from 1 to {MOST}"}, 400)
        found = await run_in_threadpool(retriever.retrieve, queries, topk)
        return JSONResponse({"result": found})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def read_corpus(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="BM25 behind HTTP")
    parser.add_argument("--corpus", type=Path, default=Path("runs/search/corpus.jsonl"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8817)
    args = parser.parse_args()
    app = application(Retriever(read_corpus(args.corpus)))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
