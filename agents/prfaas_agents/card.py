"""`MODEL_CARD.md` of a policy bundle: what it is, what it learned on, how it did, where its limits are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prfaas_env.bundle_manifest import BundleManifest

_ALGORITHMS = {
    "ppo": "PPO",
    "maskable_ppo": "MaskablePPO (moves that are not legal are masked)",
    "recurrent_ppo": "RecurrentPPO (an LSTM remembers earlier readings)",
    "sac": "SAC",
    "tqc": "TQC",
}


def _plain(text: str) -> str:
    """Text from elsewhere on one line, without what Markdown would read as a table or HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(_value(v) for v in value)
    return _plain(str(value))


def _bullets(content: dict[str, Any], indent: int = 0) -> Iterator[str]:
    """A nested list of plain facts."""
    for key, value in content.items():
        head = f"{'  ' * indent}- {_plain(str(key))}:"
        if isinstance(value, dict):
            yield head
            yield from _bullets(value, indent + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield head
            for k, item in enumerate(value):
                yield from _bullets({str(k): item}, indent + 1)
        else:
            yield f"{head} {_value(value)}"


def _validation(evaluation: dict[str, Any]) -> list[str]:
    """The table of mean TTFT per validation scenario, if the training left one."""
    chosen = evaluation.get("chosen")
    own = chosen.get("ttft_mean_s") if isinstance(chosen, dict) else None
    if not isinstance(own, dict) or not own:
        return []
    first = evaluation.get("first_policy_ttft_mean_s")
    first = first if isinstance(first, dict) else {}
    return [
        "Validation (seeds of its own, chosen by them, so these figures are a little too good):",
        "",
        "| scenario | mean TTFT, s | of the untrained policy, s |",
        "| --- | ---: | ---: |",
        *(
            f"| {_plain(label)} | {_value(value)} | {_value(first.get(label))} |"
            for label, value in own.items()
        ),
        "",
    ]


def _interval(figure: Any) -> str:
    """A mean with its interval."""
    if not isinstance(figure, dict):
        return "-"
    low, high = figure.get("low"), figure.get("high")
    limits = "" if low is None or high is None else f" [{_value(low)}, {_value(high)}]"
    return f"{_value(figure.get('mean'))}{limits}"


def _comparison(found: dict[str, Any]) -> Iterator[str]:
    """The tables of one comparison; this policy stands in bold."""
    seeds = found["seeds"]
    yield (
        f"Compared on {seeds['count']:,} {_plain(found['split'])} seeds from {seeds['first']:,} on, "
        f"with 95% intervals. {_plain(found['how_averaged'])}"
    )
    for scenario, policies in found["scenarios"].items():
        yield from (
            "",
            f"| {_plain(scenario)} | mean TTFT, s | P90, s | goodput, req/s | conversions |",
            "| --- | ---: | ---: | ---: | ---: |",
        )
        for label, figures in policies.items():
            shown = f"**{_plain(label)}**" if label == found["policy"] else _plain(label)
            yield f"| {shown} | {' | '.join(_interval(figure) for figure in figures.values())} |"
        means = {label: figures["ttft_mean_s"]["mean"] for label, figures in policies.items()}
        own = means[found["policy"]]
        lower = [_plain(label) for label, mean in means.items() if None not in (mean, own) and mean < own]
        yield from ("", f"Lower mean TTFT than this policy: {', '.join(lower) or 'none of these'}.")
    yield ""


def _evaluation(evaluation: dict[str, Any]) -> list[str]:
    if not evaluation:
        return ["The run holds no evaluation: nothing is known of how well this policy does.", ""]
    rest = {k: v for k, v in evaluation.items() if k not in {"chosen", "first_policy_ttft_mean_s"}}
    chosen = evaluation.get("chosen")
    if isinstance(chosen, dict):
        rest["chosen"] = {k: v for k, v in chosen.items() if k != "ttft_mean_s"}
    comparisons = [line for found in rest.pop("comparisons", ()) for line in _comparison(found)]
    return [*comparisons, *_validation(evaluation), *_bullets(rest), ""]


def model_card(manifest: BundleManifest) -> str:
    """The card of a bundle, Markdown."""
    decision, topology, training = manifest.decision, manifest.topology, manifest.training
    what = "a margin in seconds" if decision.routing == "margin" else "a length threshold in tokens"
    memory = " It carries recurrent state from one decision to the next." if manifest.network.states else ""
    links = "not recorded"
    if topology.links is not None:
        links = ", ".join(f"prfaas{j}-pd{i}" for j, i in topology.links) or "none"
    scenarios = [
        f"| {_plain(t.name)} | `{_plain(t.hash)}` | {t.weight:g} "
        f"| {'' if t.slice is None else f'{_plain(t.slice[0])}, {t.slice[1]:g} to {t.slice[2]:g} s'} |"
        for t in training.scenarios
    ]
    seeds = [f"- {_plain(k)}: {first:,} to {end - 1:,}" for k, (first, end) in training.seed_ranges.items()]
    return "\n".join(
        [
            f"# {_plain(manifest.name)}",
            "",
            *([_plain(manifest.description), ""] if manifest.description else []),
            f"A scheduler for Prefill-as-a-Service deployments: every {decision.decision_interval_s:g} s it reads "
            f"{len(manifest.telemetry.names)} telemetry values and gives each PD cluster {what} and a node move "
            f"({', '.join(decision.moves)}). Actions are {decision.form}.{memory}",
            "",
            "## What it learned on",
            "",
            f"{_ALGORITHMS.get(training.algorithm, _plain(training.algorithm))}, {training.steps:,} decisions, "
            f"reward `{_plain(training.reward)}`, learning seed {training.seed}.",
            "",
            "| scenario | hash | weight | trace |",
            "| --- | --- | ---: | --- |",
            *scenarios,
            "",
            "Episode seeds:",
            "",
            *seeds,
            "",
            "## How it did",
            "",
            *_evaluation(manifest.evaluation),
            "## Where it fits, and where not",
            "",
            f"- Telemetry schema {manifest.telemetry.version}, hash `{manifest.telemetry.hash}`: "
            f"{topology.n_pd} PD, {topology.n_prfaas} PrfaaS clusters, {topology.n_links} links ({links}). "
            "Any other schema is refused.",
            f"- The control interval must divide {decision.decision_interval_s:g} s.",
            "- It knows the load, hardware and link of its training. Elsewhere, compare it with the hand-written rules "
            "first (`prfaas compare`): nothing promises that it beats them.",
            "- Its seeds and trace seconds are no test of it; `prfaas compare` refuses them.",
            "",
            "## Versions",
            "",
            *(f"- {_plain(k)} {_plain(v)}" for k, v in manifest.versions.items()),
            "",
        ]
    )
