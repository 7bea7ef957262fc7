"""Decodes the token ids of runs, each with the tokenizer of the run's model."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.paths import require_model


def tokenizer_of(model_path: str) -> Tokenizer:
    """The tokenizer of a model. Raises ConfigError if this host lacks it."""
    path = require_model(model_path) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: without a tokenizer, read token ids (in Python: text=False)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception
        raise ConfigError(f"{path} is no tokenizer: {error}") from None


class Texts:
    """Texts of token ids, for columns of Arrow whose rows belong to several runs."""

    def __init__(self, model_of: Callable[[str], str], run_id: str | None = None) -> None:
        """model_of: run_id -> model.path. run_id: of all rows, if there is one run."""
        self._model_of = model_of
        self._run_id = run_id
        self._tokenizers: dict[str, Tokenizer] = {}
        self._vocabularies: dict[str, pa.Array] = {}

    def decoded(self, run_ids: pa.ChunkedArray, ids: pa.ChunkedArray) -> pa.Array:
        """The text of each row of token ids. Raises ConfigError without a tokenizer."""
        return self._by_run(run_ids, ids, self._decode)

    def token_text(self, run_ids: pa.ChunkedArray, ids: pa.ChunkedArray) -> pa.Array:
        """The text of each token. Raises ConfigError without a tokenizer."""
        return self._by_run(run_ids, ids, self._look_up)

    def _tokenizer(self, run_id: str) -> Tokenizer:
        if run_id not in self._tokenizers:
            self._tokenizers[run_id] = tokenizer_of(self._model_of(run_id))
        return self._tokenizers[run_id]

    def _decode(self, run_id: str, ids: pa.Array) -> pa.Array:
        rows = ids.fill_null([]).to_pylist()
        return pa.array(self._tokenizer(run_id).decode_batch(rows, skip_special_tokens=False), pa.string())

    def _look_up(self, run_id: str, ids: pa.Array) -> pa.Array:
        if run_id not in self._vocabularies:
            tokenizer = self._tokenizer(run_id)
            size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids may have gaps
            rows = [[number] for number in range(size)]
            texts = tokenizer.decode_batch(rows, skip_special_tokens=False)
            self._vocabularies[run_id] = pa.array(texts, pa.string())
        texts = self._vocabularies[run_id]
        known = pc.if_else(pc.less(ids, len(texts)), ids, None)  # models have more ids than their tokenizers
        return texts.take(known).fill_null("")

    def _by_run(
        self, run_ids: pa.ChunkedArray, values: pa.ChunkedArray, function: Callable[[str, pa.Array], pa.Array]
    ) -> pa.Array:
        """The results of a function for the values of each run, in the order of the rows."""
        values = values.combine_chunks()
        if self._run_id is not None:
            return function(self._run_id, values)
        names = run_ids.unique().to_pylist()
        places = [pc.indices_nonzero(pc.equal(run_ids, name)) for name in names]
        results = [function(name, values.take(at)) for name, at in zip(names, places, strict=True)]
        order = pc.sort_indices(pa.concat_arrays(places))
        return pa.concat_arrays(results).take(order)
