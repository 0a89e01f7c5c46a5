"""Map-style datasets over tokens: packed token files, text in memory, prompts, synthetic ids.

Owns: what a sample holds (ids, labels, document ids, positions) and its loss mask.
Does not own: packing (packing), order (order), batches (collate, loader). Nothing here needs torch.

Labels stand at the position of their token; the model shifts. -100 is never predicted.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.data.order import sample_rng
from headway.data.packing import PackIndex, build_packs, check_packing, load_packs
from headway.data.text import (
    DAMAGED,
    DocumentReader,
    encode_documents,
    list_some,
    read_jsonl,
    repair_text,
)
from headway.data.tokenizer import ByteTokenizer, load_tokenizer
from headway.data.tokens import TokenFile
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

IGNORED_LABEL = -100
PADDING_DOCUMENT = -1
# A damaged file trains without a word. Reading this much takes a second at most.
_MOST_VERIFIED_BYTES = 1 << 30

Ids = npt.NDArray[np.int64]
Sample = dict[str, npt.NDArray[Any]]
LossMask = Sequence[int] | Callable[[Ids], npt.NDArray[np.bool_]]
PathLike = str | os.PathLike[str]


class _Pieces:
    """One token source cut into samples: (starts, lengths) of the pieces of each sample."""

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        offsets: npt.NDArray[np.int64],
        sequence_length: int,
        packs: PackIndex | None,
        drop_remainder: bool,
    ) -> None:
        self.tokens = tokens
        self._offsets = offsets
        self._length = sequence_length
        self._packs = packs
        self._num_tokens = len(tokens)
        whole, rest = divmod(self._num_tokens, sequence_length)
        if packs is not None:
            self.num_samples, self.has_padding = packs.num_packs, packs.has_padding
        else:
            self.has_padding = bool(rest) and not drop_remainder
            self.num_samples = whole + int(self.has_padding)

    def pieces(self, sample: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Starts and lengths of the sample's pieces, and 1 if the first continues a document."""
        if self._packs is not None:
            return *self._packs.pieces(sample), 0
        start = sample * self._length
        end = min(start + self._length, self._num_tokens)
        first, last = np.searchsorted(self._offsets, (start, end), side="left")
        edges = self._offsets[first:last]
        continues = int(len(edges) == 0 or edges[0] != start)
        bounds = np.concatenate(([start], edges[0 if continues else 1 :], [end]))
        return bounds[:-1], np.diff(bounds), continues


class _PackedDataset:
    """Samples of fixed length from token sources; the common part of the datasets below."""

    # Nothing random happens in a sample, so the loader need not seed global generators for it.
    is_deterministic = True

    def __init__(
        self,
        sequence_length: int,
        *,
        packing: str,
        mask_documents: bool,
        loss_mask: LossMask | None,
        pad_token_id: int,
    ) -> None:
        check_packing(packing, sequence_length)
        self.sequence_length = sequence_length
        self.packing = packing
        self.mask_documents = mask_documents
        self.loss_mask = loss_mask
        self.pad_token_id = pad_token_id
        self._sources: list[_Pieces] = []
        self._ends: list[int] = []

    def _set_sources(self, sources: list[_Pieces]) -> None:
        self._sources = sources
        self._ends = np.cumsum([source.num_samples for source in sources]).tolist()
        self._has_padding = any(source.has_padding for source in sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples at once; the arrays of all of them are filled together."""
        if self.packing == "none":
            return [self._single(index) for index in indices]
        shape = (len(indices), self.sequence_length)
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        boundaries = np.zeros(shape, dtype=bool)
        hidden = np.zeros(shape, dtype=bool)
        filled = np.zeros(len(indices), dtype=np.int64)
        for row, index in enumerate(indices):
            source, sample = self._locate(index)
            starts, lengths, continues = source.pieces(sample)
            ends = np.cumsum(lengths)
            filled[row] = ends[-1]
            begins = ends - lengths
            boundaries[row, begins] = True
            hidden[row, begins[continues:]] = True
            if source._packs is None:
                ids[row, : ends[-1]] = source.tokens[starts[0] : starts[0] + ends[-1]]
            else:
                for begin, end, start in zip(begins.tolist(), ends.tolist(), starts.tolist()):
                    ids[row, begin:end] = source.tokens[start : start + end - begin]
        return self._assemble(ids, boundaries, hidden, filled)

    def _assemble(
        self,
        ids: Ids,
        boundaries: npt.NDArray[np.bool_],
        hidden: npt.NDArray[np.bool_],
        filled: npt.NDArray[np.int64],
    ) -> list[Sample]:
        columns = np.arange(self.sequence_length)
        real = columns < filled[:, None]
        labels = np.where(hidden | ~real, IGNORED_LABEL, ids)
        self._apply_loss_mask(ids, labels)
        batch: dict[str, npt.NDArray[Any]] = {"input_ids": ids, "labels": labels}
        if self.mask_documents:
            documents = np.cumsum(boundaries, axis=1, dtype=np.int32) - np.int32(1)
            begins = np.maximum.accumulate(np.where(boundaries, columns, 0), axis=1)
            batch["document_ids"] = np.where(real, documents, np.int32(PADDING_DOCUMENT))
            batch["position_ids"] = np.where(real, columns - begins, 0)
        elif self._has_padding:
            batch["attention_mask"] = real.astype(np.int64)
        return [{key: value[row] for key, value in batch.items()} for row in range(len(ids))]

    def _single(self, index: int) -> Sample:
        source, sample = self._locate(index)
        starts, lengths, _ = source.pieces(sample)
        ids = source.tokens[starts[0] : starts[0] + lengths[0]].astype(np.int64)
        labels = ids.copy()
        labels[0] = IGNORED_LABEL
        self._apply_loss_mask(ids, labels)
        return {"input_ids": ids, "labels": labels}

    def _apply_loss_mask(self, ids: Ids, labels: Ids) -> None:
        if callable(self.loss_mask):
            labels[~np.asarray(self.loss_mask(ids), dtype=bool)] = IGNORED_LABEL
        elif self.loss_mask is not None:
            labels[np.isin(ids, np.asarray(self.loss_mask))] = IGNORED_LABEL

    def _locate(self, index: int) -> tuple[_Pieces, int]:
        index = int(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside 0..{len(self) - 1}")
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)


class TokenDataset(_PackedDataset):
    """Sequences from one or several token files.

    `packing`: "stream" cuts the token stream into equal slices; "greedy" and "best_fit" put whole
    documents together, splitting only those longer than a sequence (`split_documents=False` cuts
    them off instead); "none" gives every document its own sample, as long as it is.
    `mask_documents` adds `document_ids` and `position_ids` that restart with every document.
    `loss_mask` is a list of token ids without loss, or a function from ids to "has loss".
    `index_dir` holds the pack indexes if they cannot stand beside the token files.
    `verify` reads the files when they are opened and compares their digests: always (True), never
    (False), or those of at most 1 GiB (None).
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        sequence_length: int,
        *,
        packing: str = "stream",
        split_documents: bool = True,
        mask_documents: bool = True,
        loss_mask: LossMask | None = None,
        drop_remainder: bool = False,
        pad_token_id: int = 0,
        index_dir: PathLike | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__(
            sequence_length,
            packing=packing,
            mask_documents=mask_documents,
            loss_mask=loss_mask,
            pad_token_id=pad_token_id,
        )
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not given:
            raise ConfigError("paths: no token file was given")
        self.split_documents = split_documents
        self.drop_remainder = drop_remainder
        self.index_dir = index_dir
        self.files = [TokenFile(path) for path in given]
        for file in self.files:
            if verify or (verify is None and file.num_bytes <= _MOST_VERIFIED_BYTES):
                file.verify()
        self._open_sources()
        if len(self) == 0:
            raise ConfigError(
                f"the token files hold no whole sequence of sequence_length={sequence_length} "
                f"tokens ({self.num_tokens} tokens in all) and drop_remainder is set"
            )

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    @property
    def vocab_size_needed(self) -> int:
        """The smallest vocabulary that holds every id of the files."""
        return max(file.max_token_id for file in self.files) + 1

    def _open_sources(self) -> None:
        sources = []
        for file in self.files:
            packs = None
            if self.packing != "stream":
                packs = load_packs(
                    file,
                    self.sequence_length,
                    self.packing,
                    split_documents=self.split_documents,
                    index_dir=self.index_dir,
                )
            sources.append(
                _Pieces(
                    file.tokens,
                    file.document_offsets,
                    self.sequence_length,
                    packs,
                    self.drop_remainder,
                )
            )
        self._set_sources(sources)

    def __getstate__(self) -> dict[str, Any]:
        # Workers map the files themselves instead of receiving a copy of the tokens.
        state = self.__dict__.copy()
        del state["_sources"], state["_ends"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_sources()


class TextDataset(_PackedDataset):
    """Sequences from texts or text files, tokenised into memory when it is made.

    `texts` are texts; `files` are text files, JSONL files or folders of them. Either or both.
    """

    def __init__(
        self,
        texts: str | Iterable[str] | None = None,
        tokenizer: Any = "bytes",
        sequence_length: int = 1024,
        *,
        files: PathLike | Sequence[PathLike] | None = None,
        packing: str = "stream",
        mask_documents: bool = True,
        loss_mask: LossMask | None = None,
        drop_remainder: bool = False,
        eos: bool = True,
        include: str | Sequence[str] | None = None,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        super().__init__(
            sequence_length,
            packing=packing,
            mask_documents=mask_documents,
            loss_mask=loss_mask,
            pad_token_id=self.tokenizer.pad_token_id or 0,
        )
        documents: list[str | bytes] = [texts] if isinstance(texts, str) else list(texts or ())
        if not all(isinstance(item, (str, bytes)) for item in documents):
            raise ConfigError("texts must be strings; give paths as files=")
        if files is not None:
            paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
            as_text = not isinstance(self.tokenizer, ByteTokenizer)
            reader = DocumentReader(paths, include=include, as_text=as_text, option="files")
            documents.extend(reader)
            for told, met in (
                ("%d files are not read, as they are no text: %s", reader.skipped_files),
                (DAMAGED, reader.damaged_files),
            ):
                if met:
                    logger.warning(told, len(met), list_some(met))
        with_eos = eos and self.tokenizer.eos_token_id is not None
        encoded = encode_documents(self.tokenizer, documents, with_eos)
        parts = [np.asarray(ids, dtype=np.uint32) for ids in encoded if len(ids)]
        if not parts:
            option = "texts" if files is None else "files"
            raise ConfigError(f"{option}: the dataset is empty, there is no text in it")
        self.tokens = np.concatenate(parts)
        offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
        packs = None
        if packing != "stream":
            packs = build_packs(offsets, sequence_length, packing)
        self.num_documents = len(parts)
        self._set_sources([_Pieces(self.tokens, offsets, sequence_length, packs, drop_remainder)])
        if len(self) == 0:
            raise ConfigError(
                f"texts: {len(self.tokens)} tokens are less than one sequence of "
                f"sequence_length={sequence_length} and drop_remainder is set"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def vocab_size_needed(self) -> int:
        return int(self.tokens.max()) + 1


class PromptDataset:
    """Prompt and completion pairs; only the completion (and the end of text) has loss.

    A pair longer than `max_length` is cut at the end; one whose prompt alone fills it is an error.
    """

    is_deterministic = True

    def __init__(
        self,
        records: PathLike | Iterable[dict[str, Any]],
        tokenizer: Any = "bytes",
        *,
        prompt_key: str = "prompt",
        completion_key: str = "completion",
        max_length: int | None = None,
        eos: bool = True,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer)
        self.max_length = max_length
        if isinstance(records, (str, os.PathLike)):
            path = records
            named = [(f"{path}:{number}", record) for number, record in read_jsonl(path)]
        else:
            named = [(f"record {number}", record) for number, record in enumerate(records)]
        if not named:
            raise ConfigError("records: the dataset is empty, there is no prompt in it")
        texts: list[list[str]] = [[], []]
        damaged: list[str] = []
        for where, record in named:
            for column, key in zip(texts, (prompt_key, completion_key)):
                value = record.get(key)
                if not isinstance(value, str):
                    raise ConfigError(
                        f"{where}: no text under {key!r}; it has: {', '.join(map(str, record))}"
                    )
                column.append(repair_text(value))
                if column[-1] is not value:
                    damaged.append(where)
        if damaged:
            logger.warning(
                "%d prompts or completions hold halves of characters, which were replaced: %s",
                len(damaged),
                list_some(damaged),
            )
        prompts = self.tokenizer.encode_batch(texts[0])
        with_eos = eos and self.tokenizer.eos_token_id is not None
        completions = self.tokenizer.encode_batch(texts[1], add_eos=with_eos)
        self._ids: list[Ids] = []
        self._prompt_lengths: list[int] = []
        for (where, _), prompt, completion in zip(named, prompts, completions):
            ids = np.array([*prompt, *completion][:max_length], dtype=np.int64)
            if len(ids) <= max(len(prompt), 1):
                raise ConfigError(
                    f"{where}: nothing is left to predict after a prompt of {len(prompt)} tokens "
                    f"(max_length={max_length})"
                )
            self._ids.append(ids)
            self._prompt_lengths.append(len(prompt))

    @property
    def vocab_size_needed(self) -> int:
        return max(int(ids.max()) for ids in self._ids) + 1

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Sample:
        ids = self._ids[index]
        labels = ids.copy()
        labels[: self._prompt_lengths[index]] = IGNORED_LABEL
        return {"input_ids": ids.copy(), "labels": labels}


class SyntheticDataset:
    """Random ids, each sample a pure function of its index: any size costs nothing."""

    is_deterministic = True

    def __init__(
        self, num_samples: int, sequence_length: int, vocab_size: int, seed: int = 0
    ) -> None:
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("sequence_length", sequence_length, 2),
            ("vocab_size", vocab_size, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        self.num_samples = num_samples
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.seed = seed

    @property
    def vocab_size_needed(self) -> int:
        return self.vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:
        index = int(index)
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} is outside 0..{self.num_samples - 1}")
        rng = sample_rng(self.seed, 0, index)
        ids = rng.integers(0, self.vocab_size, self.sequence_length, dtype=np.int64)
        return {"input_ids": ids, "labels": ids.copy()}
