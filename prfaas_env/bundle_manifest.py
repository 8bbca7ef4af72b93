"""The manifest of a policy bundle, and reading a bundle's folder without trusting it.

A bundle is a folder with `manifest.json`, `policy.onnx` and `MODEL_CARD.md`; `docs/bundle.md` describes the format.
Nothing in it is ever run but the network, and that only after the checks here and in `onnx_check`.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import Field as PydanticField
from pydantic import ValidationError, model_validator

from prfaas_env.base import Frozen, PrfaasError, first_error
from prfaas_env.decision import (
    MARGIN_GRID_S,
    MARGIN_MAX_S,
    THRESHOLD_MAX_TOKENS,
    THRESHOLD_MIN_TOKENS,
    ActionCodec,
    ActionForm,
    Move,
    Routing,
)
from prfaas_env.sites import LinkPairs, link_difference
from prfaas_env.telemetry import SCHEMA_VERSION, Field, TelemetrySchema

FORMAT = "prfaas-policy"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
NETWORK_FILE = "policy.onnx"
CARD_FILE = "MODEL_CARD.md"

#: Largest size of each file, in bytes. A policy of two hidden layers of 64 has about 60 KB.
MAX_BYTES = {MANIFEST_FILE: 4 << 20, NETWORK_FILE: 64 << 20, CARD_FILE: 1 << 20}

#: Names inside the network.
OBSERVATION = "observation"
LOGITS = "logits"
ACTION, MEAN, LOG_STD = "action", "mean", "log_std"
OUTPUTS: dict[ActionForm, tuple[str, ...]] = {"discrete": (LOGITS,), "continuous": (ACTION, MEAN, LOG_STD)}


# ------------------------------------------------------------------------------------ what was seen


class FieldRecord(Frozen):
    """One telemetry field as it was when the policy was trained."""

    name: str
    unit: str
    low: float
    high: float
    scale: Literal["linear", "log", "symlog"]
    doc: str
    scale_at: float
    flag: str | None


class TelemetryRecord(Frozen):
    """The observation that the policy was trained on."""

    version: int
    hash: str
    n_pd: int
    n_prfaas: int
    n_links: int
    names: tuple[str, ...]
    fields: tuple[FieldRecord, ...]

    @classmethod
    def of(cls, schema: TelemetrySchema) -> TelemetryRecord:
        """Record of a schema."""
        return cls(
            version=SCHEMA_VERSION,
            hash=schema.hash,
            n_pd=schema.n_pd,
            n_prfaas=schema.n_prfaas,
            n_links=schema.n_links,
            names=schema.names,
            fields=tuple(FieldRecord(**dataclasses.asdict(f)) for f in schema.fields),
        )

    def as_schema(self) -> TelemetrySchema:
        """The schema as it was then, which this version of the code may no longer make."""
        then = TelemetrySchema(self.n_pd, self.n_prfaas, self.n_links)
        # Names and fields are cached properties: what is stored under their names is what they give.
        then.__dict__["names"] = self.names
        then.__dict__["fields"] = tuple(Field(**f.model_dump()) for f in self.fields)
        return then

    def misfit(self, schema: TelemetrySchema, links: LinkPairs | None, pairs: LinkPairs) -> str:
        """Why a policy with this observation cannot run on a deployment; empty if it can.

        Args:
            schema: telemetry of the deployment.
            links: which clusters each link joined in training, None where that was not kept.
            pairs: which clusters each link of the deployment joins.
        """
        difference = schema.difference(self.as_schema())
        if difference:
            return f"trained on other telemetry than this deployment and version give: {difference}"
        difference = link_difference(pairs, pairs if links is None else links)
        return f"trained on other links than this deployment has: {difference}" if difference else ""


#: A grid value in JSON, which has no infinity.
GridValue = float | Literal["inf", "-inf"]


def json_grid(values: tuple[float, ...]) -> tuple[GridValue, ...]:
    """A grid as JSON holds it."""
    return tuple(v if math.isfinite(v) else "inf" if v > 0 else "-inf" for v in values)


def grid_of_json(values: tuple[GridValue, ...]) -> tuple[float, ...]:
    """The grid again."""
    return tuple(map(float, values))


class CodecRecord(Frozen):
    """How actions become decisions."""

    n_pd: int
    routing: Routing
    form: ActionForm
    margins_s: tuple[GridValue, ...] = json_grid(MARGIN_GRID_S)

    @classmethod
    def of(cls, codec: ActionCodec) -> CodecRecord:
        """Record of a codec."""
        return cls(
            n_pd=codec.n_pd, routing=codec.routing, form=codec.form, margins_s=json_grid(codec.margins_s)
        )

    def codec(self) -> ActionCodec:
        """The codec."""
        return ActionCodec(self.n_pd, self.routing, self.form, grid_of_json(self.margins_s))

    @model_validator(mode="after")
    def _is_a_codec(self) -> Self:
        self.codec()
        return self


class TrainedOn(Frozen):
    """A scenario of the training."""

    name: str
    hash: str
    weight: float
    slice: tuple[str, float, float] | None = None
    """(file, first second, last second) of the trace that it replays."""


class InputRanges(Frozen):
    """What each telemetry field was seen to be when the policy ran on its training scenarios, in physical units.

    `low` and `high` stand in the order of `telemetry.names`; None for a field that was never there (its flag was 0).
    """

    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    readings: Annotated[int, PydanticField(ge=1)]
    """How many readings they are of."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if len(self.low) != len(self.high):
            raise ValueError(f"low has {len(self.low)} fields, high {len(self.high)}")
        for k, (a, b) in enumerate(zip(self.low, self.high, strict=True)):
            if (a is None) != (b is None) or (a is not None and b is not None and a > b):
                raise ValueError(f"field {k}: low is {a}, high {b}")
        return self


# ------------------------------------------------------------------------------------- the manifest

Name = Annotated[str, PydanticField(min_length=1, max_length=200)]
Sha256 = Annotated[str, PydanticField(pattern=r"\A[0-9a-f]{64}\z")]
Count = Annotated[int, PydanticField(ge=0)]


class FileRecord(Frozen):
    """Checksum and size of a file of the bundle."""

    sha256: Sha256
    bytes: Count


class StateRecord(Frozen):
    """One recurrent state: an input that is zero at the start, then what the output gave at the last decision."""

    input: Name
    output: Name
    shape: tuple[Annotated[int, PydanticField(ge=1, le=1 << 16)], ...] = PydanticField(
        min_length=1, max_length=4
    )


class NetworkRecord(Frozen):
    """Inputs and outputs of `policy.onnx`, all float32; the batch dimension is 1.

    `logits` of the discrete form stand side by side in the order of the action's parts. The continuous form gives
    `action` (the deterministic one) and `mean` and `log_std` for sampling; with `squashed` an action is
    tanh(mean + std * noise), without it that sum is clipped to -1..1.
    """

    opset: Annotated[int, PydanticField(ge=1)]
    observation: Literal["observation"] = "observation"
    outputs: tuple[Name, ...]
    squashed: bool = False
    states: tuple[StateRecord, ...] = PydanticField(default=(), max_length=16)


def _decoding(codec: ActionCodec) -> dict[str, Any]:
    """The fields of a `DecisionRecord` that follow from its codec."""
    margins, discrete = codec.routing == "margin", codec.form == "discrete"
    ends = (-MARGIN_MAX_S, MARGIN_MAX_S) if margins else (THRESHOLD_MIN_TOKENS, THRESHOLD_MAX_TOKENS)
    return {
        "routing_unit": "s" if margins else "tokens",
        "routing_grid": json_grid(codec.grid) if discrete else None,
        "routing_range": None if discrete else (float(ends[0]), float(ends[1])),
        "moves": tuple(move.name.lower() for move in Move),
    }


class DecisionRecord(Frozen):
    """What the policy decides, in full, so that another program can decode it.

    `masked`: logits of moves that are not legal now are left out before the choice. Without it the choice is made
    first, and a move that is not legal becomes none. `decision_interval_s` is the policy's own clock; conversions
    were legal at multiples of `conversion_interval_s` (None where that is not known).
    """

    n_pd: Annotated[int, PydanticField(ge=1)]
    routing: Routing
    form: ActionForm
    masked: bool
    routing_unit: Literal["s", "tokens"]
    routing_grid: tuple[GridValue, ...] | None
    routing_range: tuple[float, float] | None
    moves: tuple[str, ...]
    decision_interval_s: Annotated[float, PydanticField(gt=0, le=1e6)]
    conversion_interval_s: Annotated[float, PydanticField(gt=0)] | None

    @classmethod
    def of(
        cls,
        codec: ActionCodec,
        *,
        masked: bool,
        decision_interval_s: float,
        conversion_interval_s: float | None,
    ) -> DecisionRecord:
        """Record of a codec and the clocks."""
        return cls(
            n_pd=codec.n_pd,
            routing=codec.routing,
            form=codec.form,
            masked=masked,
            decision_interval_s=decision_interval_s,
            conversion_interval_s=conversion_interval_s,
            **_decoding(codec),
        )

    def codec(self) -> ActionCodec:
        """The codec."""
        if self.routing == "margin" and self.routing_grid is not None:
            return ActionCodec(self.n_pd, self.routing, self.form, grid_of_json(self.routing_grid))
        return ActionCodec(self.n_pd, self.routing, self.form)

    @model_validator(mode="after")
    def _as_decoded_here(self) -> Self:
        if self.masked and self.form != "discrete":
            raise ValueError("masked belongs to the discrete form")
        for name, own in _decoding(self.codec()).items():
            if getattr(self, name) != own:
                raise ValueError(f"{name} is {getattr(self, name)}; this version decodes {own}")
        return self


class TopologyRecord(Frozen):
    """The deployment: numbers of clusters, and (PrfaaS cluster, PD cluster) of each link by place if it was kept."""

    n_pd: Annotated[int, PydanticField(ge=1)]
    n_prfaas: Count
    n_links: Count
    links: LinkPairs | None


class TrainingRecord(Frozen):
    """Where the policy comes from."""

    algorithm: Name
    steps: Count
    seed: int
    reward: str
    scenarios: tuple[TrainedOn, ...]
    seed_ranges: dict[str, tuple[int, int]]
    """[first, end) of the episode seeds by purpose."""
    weights_sha256: str
    """Checksum of the file that the bundle was exported from; empty if it came from memory."""


class BundleManifest(Frozen):
    """`manifest.json`."""

    format: Literal["prfaas-policy"]
    format_version: Literal[1]
    name: Name
    description: str
    network: NetworkRecord
    telemetry: TelemetryRecord
    topology: TopologyRecord
    decision: DecisionRecord
    training: TrainingRecord
    evaluation: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    input_ranges: InputRanges | None = None
    """Of the training; None in a bundle from before they were kept, or of a run that is gone."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        wanted = {NETWORK_FILE, CARD_FILE}
        if set(self.files) != wanted:
            raise ValueError(f"files names {sorted(self.files)}; it must name {sorted(wanted)}")
        seen, topology = self.telemetry, self.topology
        if seen.version != SCHEMA_VERSION:
            raise ValueError(f"telemetry.version is {seen.version}; this version reads {SCHEMA_VERSION}")
        if len(seen.names) != len(seen.fields) or seen.as_schema().hash != seen.hash:
            raise ValueError("telemetry.hash does not belong to the names and fields beside it")
        for name in ("n_pd", "n_prfaas", "n_links"):
            if getattr(topology, name) != getattr(seen, name):
                raise ValueError(
                    f"topology.{name} is {getattr(topology, name)}, telemetry.{name} {getattr(seen, name)}"
                )
        if self.input_ranges is not None and len(self.input_ranges.low) != len(seen.names):
            raise ValueError(
                f"input_ranges.low has {len(self.input_ranges.low)} fields, telemetry {len(seen.names)}"
            )
        if self.decision.n_pd != topology.n_pd:
            raise ValueError(f"decision.n_pd is {self.decision.n_pd}, topology.n_pd {topology.n_pd}")
        if topology.links is not None and len(topology.links) != topology.n_links:
            raise ValueError(f"topology.links has {len(topology.links)} links, n_links is {topology.n_links}")
        outputs = OUTPUTS[self.decision.form]
        if self.network.outputs != outputs:
            raise ValueError(
                f"network.outputs is {list(self.network.outputs)}; the {self.decision.form} form has {list(outputs)}"
            )
        names = [OBSERVATION, *outputs, *(n for s in self.network.states for n in (s.input, s.output))]
        if len(set(names)) != len(names):
            raise ValueError("network.states: a name is used twice")
        return self

    def text(self) -> str:
        """The file's text."""
        content = self.model_dump(mode="json")
        if self.input_ranges is None:
            del content["input_ranges"]  # as a manifest was before there were any
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


# -------------------------------------------------------------------------------------- the folder


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of a file of a bundle; it must be a plain file of at most `MAX_BYTES`, not a link.

    Raises:
        PrfaasError: it is absent, a link, no plain file, too large, or cannot be read.
    """
    path, limit = folder / name, MAX_BYTES[name]
    flags = (
        os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "is a link")
        handle = os.open(path, flags)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise PrfaasError(f"{path}: is not a plain file")
            if status.st_size > limit:
                raise PrfaasError(f"{path}: has {status.st_size:,} bytes; at most {limit:,} are read")
            with open(handle, "rb", closefd=False) as file:
                content = file.read(limit + 1)
        finally:
            os.close(handle)
    except OSError as error:
        what = "is a link; a bundle holds plain files" if error.errno == errno.ELOOP else error.strerror
        raise PrfaasError(f"{path}: cannot be read: {what}") from None
    if len(content) > limit:
        raise PrfaasError(f"{path}: has more than {limit:,} bytes")
    return content


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands there twice")
    return found


def parse_manifest(content: bytes, where: Path) -> BundleManifest:
    """A manifest from the bytes of its file; PrfaasError names the field."""
    try:
        raw = json.loads(content.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PrfaasError(f"{where}: is not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise PrfaasError(f"{where}: is not a JSON object")
    for name, wanted in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        # before all other fields, which another version may have in another shape
        if raw.get(name) != wanted or isinstance(raw.get(name), bool):
            raise PrfaasError(f"{where}: {name}: this version reads {wanted!r} (found {raw.get(name)!r:.80})")
    try:
        return BundleManifest.model_validate(raw)
    except ValidationError as error:
        told = " ".join(str(first_error(error, str(where))).split())
        raise PrfaasError(told if len(told) <= 500 else told[:500] + " ...") from None


def sha256(content: bytes) -> str:
    """SHA-256, hex."""
    return hashlib.sha256(content).hexdigest()


@dataclasses.dataclass(frozen=True)
class BundleFiles:
    """A bundle as read: every checksum was right."""

    folder: Path
    manifest: BundleManifest
    network: bytes
    fingerprint: str
    """12 hex digits of the manifest, which holds the checksums of all other files."""


def is_bundle(path: str | Path) -> bool:
    """Whether a path is a folder with a manifest (or with a link in its place, which is refused later)."""
    try:
        return os.path.lexists(Path(path) / MANIFEST_FILE)
    except ValueError:  # a null byte
        return False


def read_bundle(path: str | Path) -> BundleFiles:
    """Read a bundle and check everything but the network itself.

    Raises:
        PrfaasError: one line with the file and what is wrong with it.
    """
    try:
        folder = Path(path).resolve(strict=True)  # once: a link to the present bundle may be moved meanwhile
    except (OSError, ValueError, RuntimeError):
        raise PrfaasError(f"bundle {path}: no such folder") from None
    if not folder.is_dir():
        raise PrfaasError(f"bundle {path}: is not a folder; give the one that holds {MANIFEST_FILE}")
    text = read_file(folder, MANIFEST_FILE)
    manifest = parse_manifest(text, folder / MANIFEST_FILE)
    found = {}
    for name, record in manifest.files.items():
        content = found[name] = read_file(folder, name)
        if len(content) != record.bytes:
            raise PrfaasError(
                f"{folder / name}: has {len(content):,} bytes, {MANIFEST_FILE} says {record.bytes:,}"
            )
        if sha256(content) != record.sha256:
            raise PrfaasError(f"{folder / name}: is not the file that {MANIFEST_FILE} names (sha256 differs)")
    return BundleFiles(folder, manifest, found[NETWORK_FILE], sha256(text)[:12])
