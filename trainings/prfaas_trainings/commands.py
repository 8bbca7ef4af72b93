"""`prfaas train`, `export`, `compare`, `report`, `sweep`, `demo`. Heavy packages are loaded when a command runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from prfaas_env.base import PrfaasError
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES

#: Packages of the `train` extra that a command may need.
_LEARNING = ("torch", "stable_baselines3", "tensorboard")
_DRAWING = ("matplotlib",)
_EXPORTING = ("torch", "stable_baselines3", "sb3_contrib", "onnx")
_REPORTING = ("matplotlib", "jinja2")


def _need(packages: tuple[str, ...], what: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise PrfaasError(f"{what} needs {', '.join(missing)}: pip install 'prfaas-env[train]'")


def compare(
    scenario: Annotated[
        list[str] | None,
        typer.Option("--scenario", "-s", help="Shipped scenario or path of a YAML file; may be repeated."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="POLICY, POLICY:key=value, POLICY@DEPLOYMENT or LABEL=POLICY; may be repeated. "
            "Default: every rule.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of episode seeds.")] = 20,
    first_seed: Annotated[
        int | None, typer.Option(help="First episode seed; default the first one of the split.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="What the seeds are for: test, validation or training.")
    ] = "test",
    reference: Annotated[
        str | None, typer.Option(help="Policy that differences are taken from; default the first.")
    ] = None,
    deployments: Annotated[
        bool, typer.Option("--deployments", help="Add never@homogeneous and always@naive.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="field.path=value for every scenario; may be repeated."),
    ] = None,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = DEFAULT_ENGINE,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default the cores of this machine.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results.csv, metrics.json, curves.json and plots. Goes on with a comparison there."
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also write report.html to --out (see `prfaas report`).")
    ] = False,
    timeline: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy in the timeline plot; may be repeated. Default: learned (or first), best rule, reference."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start anew: remove the comparison in --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json instead of tables.")] = False,
) -> None:
    """Run policies on the same seeds: figures, paired differences with intervals, who loses to whom."""
    from prfaas_env.scenarios import load_scenario
    from prfaas_trainings import compare as comparing
    from prfaas_trainings import compare_command
    from prfaas_trainings.parts import command_line
    from prfaas_trainings.seeds import Split, seeds_of

    if engine not in ENGINES:
        raise PrfaasError(f"--engine is {engine!r}; allowed: {', '.join(ENGINES)}")
    for name, given in (("--timeline", timeline), ("--report", report)):
        if out is None and given:
            raise PrfaasError(f"{name} needs --out")
    chosen = seeds_of(split, first_seed, seeds)
    named: Split = split  # type: ignore[assignment]
    scenarios = [load_scenario(name, overrides=overrides or ()) for name in scenario or ["paper"]]
    rows = comparing.rows_of(policy or [], deployments)
    if out is not None:
        _need(_DRAWING, "--out with its plots")
    if report:
        _need(_REPORTING, "--report")
    plan = comparing.prepare(scenarios, rows, seeds=chosen, split=named, reference=reference, engine=engine)
    again = command_line(
        "compare",
        {
            "--scenario": scenario,
            "--policy": policy,
            "--deployments": deployments,
            "--set": overrides,
            "--seeds": seeds,
            "--first-seed": first_seed,
            "--split": None if split == "test" else split,
            "--reference": reference,
            "--engine": None if engine == DEFAULT_ENGINE else engine,
            "--jobs": jobs,
            "--timeline": timeline,
            "--report": report,
            "--out": out,
        },
    )
    compare_command.run(
        plan,
        out,
        jobs=jobs,
        timeline=timeline or (),
        force=force,
        report=report,
        as_json=as_json,
        again=again,
    )


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a comparison, a demonstration or a training.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file; default report.html in the folder.")
    ] = None,
    reproduction_requests: Annotated[
        int,
        typer.Option(
            min=0, help="Requests simulated per column of the paper's table; 0 leaves the table out."
        ),
    ] = 20_000,
) -> None:
    """Write one HTML file that tells what a comparison or training found; it needs no network to be read."""
    _need(_REPORTING, "report")
    from prfaas_trainings.report import write_report

    target = out if out is not None else folder / "report.html"
    typer.echo(f"written: {write_report(folder, target, reproduction_requests)}")


def sweep(
    study: Annotated[
        str | None,
        typer.Option("--study", help="Shipped study, FILE.yaml with one study, or FILE.yaml:NAME."),
    ] = None,
    scenario: Annotated[
        str | None, typer.Option("--scenario", "-s", help="Shipped scenario or path of a YAML file.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="field.path=value,value,...: one or two fields with several values are varied, fields with one "
            "value hold in every cell.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="POLICY, POLICY:key=value, POLICY@DEPLOYMENT or LABEL=POLICY; may be repeated. "
            "Default: static and earliest_finish.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Episodes per cell and policy; default 10, or the study's.")
    ] = None,
    first_seed: Annotated[
        int | None, typer.Option(help="First episode seed; default the first one of the split.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="What the seeds are for: test, validation or training.")
    ] = "test",
    reference: Annotated[
        str | None, typer.Option(help="Policy that differences are taken from; default the first.")
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Figure to show and draw; may be repeated.")
    ] = None,
    engine: Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")] = DEFAULT_ENGINE,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default the cores of this machine.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; default runs/sweep-NAME. Goes on with one there."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew: remove the sweep in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json instead of tables.")] = False,
) -> None:
    """Vary one or two scenario fields, run policies on every cell, show and draw what comes out."""
    from prfaas_trainings import sweep_command
    from prfaas_trainings.parts import command_line

    if engine not in ENGINES:
        raise PrfaasError(f"--engine is {engine!r}; allowed: {', '.join(ENGINES)}")
    _need(_DRAWING, "sweep with its plots")
    if study is None:
        chosen = sweep_command.from_options(
            scenario or "paper", assignments or (), policy or (), seeds, reference, metric
        )
    else:
        for name, value in (("--scenario", scenario), ("--set", assignments), ("--policy", policy)):
            if value:
                raise PrfaasError(
                    f"{name}: belongs to a sweep without --study; change the study file instead"
                )
        chosen = sweep_command.from_study(study, seeds, reference, metric)
    folder = out if out is not None else Path("runs") / f"sweep-{chosen.name}"
    again = command_line(
        "sweep",
        {
            "--study": study,
            "--scenario": scenario,
            "--set": assignments,
            "--policy": policy,
            "--seeds": seeds,
            "--first-seed": first_seed,
            "--split": None if split == "test" else split,
            "--reference": reference,
            "--metric": metric,
            "--engine": None if engine == DEFAULT_ENGINE else engine,
            "--jobs": jobs,
            "--out": folder,
        },
    )
    sweep_command.run(
        chosen,
        folder,
        split=split,
        first_seed=first_seed,
        engine=engine,
        jobs=jobs,
        force=force,
        as_json=as_json,
        again=again,
    )


def train(
    config: Annotated[
        str, typer.Option("--config", "-c", help="Shipped training or path of a YAML file.")
    ] = "drift",
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME-seedSEED.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after this time, validation included; overrides the configuration."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many decisions; overrides the configuration.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of weights, actions and episodes.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="field.path=value of the configuration; may be repeated."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes for the validation; default the cores.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier run in --out.")] = False,
) -> None:
    """Train a policy with PPO; the best one by validation seeds is kept as policy.zip."""
    _need(_LEARNING, "train")
    from prfaas_trainings import training
    from prfaas_trainings.config import load_config
    from prfaas_trainings.episodes import episode_runner

    given = [*(overrides or ())]
    for name, value in (("minutes", minutes), ("total_steps", steps), ("seed", seed)):
        if value is not None:
            given.append(f"{name}={value!r}")
    if minutes is not None and steps is None:
        given.append("total_steps=null")
    if steps is not None and minutes is None:
        given.append("minutes=null")
    loaded = load_config(config, given)
    folder = out if out is not None else Path("runs") / f"{loaded.name}-seed{loaded.seed}"
    training.check_out(folder, force)
    with episode_runner(jobs or training.default_runner_jobs(loaded)) as runner:
        result = training.train(loaded, folder, runner=runner, force=force)
    typer.echo(
        f"{result.stopped} at step {result.steps:,}; kept the policy of step {result.best.steps:,}: "
        f"{training.describe(result.best)}"
    )
    typer.echo(f"policy: {result.policy}   (prfaas compare --policy ppo:path={result.policy})")
    typer.echo(f"curves: tensorboard --logdir {folder / 'tensorboard'}")


def export(
    run: Annotated[
        Path, typer.Argument(help="Run folder of a training, one of its checkpoints, or a policy.zip.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the bundle.")],
    name: Annotated[str | None, typer.Option(help="Name for readers; default that of the run.")] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(help="Comparison (--out of prfaas compare) to take figures from; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier bundle in --out.")] = False,
) -> None:
    """Write a trained policy as a bundle: an ONNX network, a manifest and a model card, no pickle."""
    _need(_EXPORTING, "export")
    from prfaas_trainings.exporting import export_run

    manifest = export_run(run, out, name=name, force=force, evaluations=evaluation or ())
    size = manifest.files["policy.onnx"].bytes
    typer.echo(f"bundle: {out}   ({manifest.training.algorithm}, {size:,} bytes of network)")
    typer.echo(f"use it: prfaas simulate --policy {out}   (needs the extra `policy`)")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the results; an earlier demonstration is replaced.")
    ] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(help="Time to learn, validation included.")] = 4.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: shows that everything runs.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; default the cores of this machine.")
    ] = None,
) -> None:
    """Replay a real trace, learn for a few minutes, compare on data that nobody has seen."""
    _need((*_LEARNING, *_DRAWING), "demo")
    from prfaas_trainings import demo as demonstration
    from prfaas_trainings import tables
    from prfaas_trainings.episodes import default_jobs

    if not minutes > 0:
        raise PrfaasError(f"--minutes must be above 0, found {minutes:g}")
    plan = demonstration.demo_plan(minutes, quick)
    n_jobs = jobs if jobs is not None else 1 if quick else default_jobs()
    demonstration.run_demo(out, plan, n_jobs, tables.console_for_tables())
