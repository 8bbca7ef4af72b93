"""The commands of this room: `prfaas train`, `tune`, `compare`, ... Heavy packages are loaded when one runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prfaas_env.base import PrfaasError
from prfaas_env.simulator.engine import DEFAULT_ENGINE, ENGINES, check_engine

if TYPE_CHECKING:
    from prfaas_trainings.config import TrainingConfig
    from prfaas_trainings.episodes import EpisodeRunner
    from prfaas_trainings.seeds import Split
    from prfaas_trainings.training import TrainingResult

#: Packages of the `train` extra that a command may need.
_LEARNING = ("torch", "stable_baselines3", "sb3_contrib", "tensorboard")
_DRAWING = ("matplotlib",)
_EXPORTING = ("torch", "stable_baselines3", "sb3_contrib", "onnx")
_REPORTING = ("matplotlib", "jinja2")
_TUNING = ("optuna",)

#: Options that several commands share.
FirstSeed = Annotated[
    int | None, typer.Option(help="First episode seed; default the first one of the split.")
]
SplitName = Annotated[str, typer.Option(help="What the seeds are for: test, validation or training.")]
Reference = Annotated[
    str | None, typer.Option(help="Policy that differences are taken from; default the first.")
]
EngineName = Annotated[str, typer.Option(help=f"{', '.join(ENGINES)}.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; default the cores of this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print metrics.json instead of tables.")]


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
    first_seed: FirstSeed = None,
    split: SplitName = "test",
    reference: Reference = None,
    deployments: Annotated[
        bool, typer.Option("--deployments", help="Add never@homogeneous and always@naive.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="field.path=value for every scenario; may be repeated."),
    ] = None,
    engine: EngineName = DEFAULT_ENGINE,
    jobs: Jobs = None,
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
    as_json: AsJson = False,
) -> None:
    """Run policies on the same seeds: figures, paired differences with intervals, who loses to whom."""
    from prfaas_env.scenarios import load_scenario
    from prfaas_trainings import compare as comparing
    from prfaas_trainings import compare_command
    from prfaas_trainings.parts import command_line
    from prfaas_trainings.seeds import seeds_of

    check_engine(engine)
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
    first_seed: FirstSeed = None,
    split: SplitName = "test",
    reference: Reference = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Figure to show and draw; may be repeated.")
    ] = None,
    engine: EngineName = DEFAULT_ENGINE,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; default runs/sweep-NAME. Goes on with one there."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew: remove the sweep in --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Vary one or two scenario fields, run policies on every cell, show and draw what comes out."""
    from prfaas_trainings import sweep_command
    from prfaas_trainings.parts import command_line

    check_engine(engine)
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
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Run folder to go on with from its newest checkpoint; --steps and --minutes then move its end."
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="With --resume: take a checkpoint that you did not write yourself."),
    ] = False,
) -> None:
    """Train a policy; the best one by validation seeds is kept as policy.zip."""
    _need((*_LEARNING, *_DRAWING), "train")
    from prfaas_trainings import training
    from prfaas_trainings.episodes import episode_runner
    from prfaas_trainings.evaluating import config_of, policy_folder

    if resume is not None:
        given_too = {
            "--config": config != "drift",
            "--out": out,
            "--seed": seed is not None,
            "--set": overrides,
        }
        for name, value in {**given_too, "--force": force}.items():
            if value:
                raise PrfaasError(
                    f"{name}: belongs to a new run; --resume goes on with the configuration of its own"
                )
        folder, loaded = resume, config_of(policy_folder(resume, None))
    else:
        if trust:
            raise PrfaasError("--trust: belongs to --resume")
        loaded = _training_config(config, overrides, minutes, steps, seed)
        default = loaded.name if loaded.seeds else f"{loaded.name}-seed{loaded.seed}"
        folder = out if out is not None else Path("runs") / default
        training.check_out(folder, force)
    try:
        with episode_runner(jobs or training.default_runner_jobs(loaded)) as runner:
            done = (
                _several(loaded, folder, runner, resume is not None, force, trust, steps, minutes)
                if loaded.seeds
                else training.resume(folder, runner=runner, trust=trust, total_steps=steps, minutes=minutes)
                if resume is not None
                else training.train(loaded, folder, runner=runner, force=force)
            )
    except KeyboardInterrupt:
        typer.echo(
            f"interrupted at once; go on from the last checkpoint: prfaas train --resume {folder}", err=True
        )
        raise
    if done is not None:
        typer.echo(
            f"{done.stopped} at step {done.steps:,}; kept the policy of step {done.best.steps:,}: "
            f"{training.describe(done.best)}"
        )
        if done.interrupted:
            typer.echo(f"go on: prfaas train --resume {folder}")
    policy = folder / "policy.zip"
    typer.echo(f"policy: {policy}   (prfaas compare --policy ppo:path={policy})")
    curves = folder if loaded.seeds else folder / "tensorboard"
    typer.echo(f"curves: tensorboard --logdir {curves}")


def _training_config(
    config: str, overrides: list[str] | None, minutes: float | None, steps: int | None, seed: int | None
) -> TrainingConfig:
    """The configuration of a new run with the options laid over it."""
    from prfaas_trainings.config import load_config

    given = [*(overrides or ())]
    for name, value in (("minutes", minutes), ("total_steps", steps), ("seed", seed)):
        if value is not None:
            given.append(f"{name}={value!r}")
    if seed is not None:
        given.append("seeds=[]")
    if minutes is not None and steps is None:
        given.append("total_steps=null")
    if steps is not None and minutes is None:
        given.append("minutes=null")
    return load_config(config, given)


def _several(
    config: TrainingConfig,
    folder: Path,
    runner: EpisodeRunner,
    resume: bool,
    force: bool,
    trust: bool,
    steps: int | None,
    minutes: float | None,
) -> TrainingResult | None:
    """Train with several seeds; the result of a run that Ctrl-C ended, else None."""
    from prfaas_trainings import several

    if resume and (steps is not None or minutes is not None):
        raise PrfaasError(
            f"--steps, --minutes: give one of the runs to --resume, such as {folder}/seed{config.seeds[0]}"
        )
    results = (
        several.resume_all(folder, runner=runner, trust=trust)
        if resume
        else several.train_all(config, folder, runner=runner, force=force)
    )
    typer.echo(several.describe_all(folder))
    return results[-1] if results and results[-1].interrupted else None


def tune(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="Shipped tuning or path of a YAML file.")
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="Family of scenarios (a shipped one, or FILE.yaml:NAME) in place of the tuning's."),
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="Choose the best rule of --family among those in --save, tuned or not."),
    ] = False,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Trials in all; overrides the tuning. May be raised later.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="field.path=value of the tuning; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/tune-NAME-FAMILY.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write RULE/FAMILY.yaml and .csv here; with --best the record.")
    ] = None,
    jobs: Jobs = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew: remove the tuning in --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tune a rule's parameters, or fields of a training, on training seeds; choose on validation seeds."""
    _need(_TUNING, "tune")
    from prfaas_trainings import tune_command
    from prfaas_trainings.parts import command_line
    from prfaas_trainings.tune_config import load_tuning

    if best:
        refused = {"--config": config, "--trials": trials, "--set": overrides}
        for name, value in refused.items():
            if value:
                raise PrfaasError(f"{name}: has no effect with --best")
        if family is None or save is None:
            raise PrfaasError("--best needs --family and --save")
        folder = out if out is not None else Path("runs") / f"tune-best-{family.rpartition(':')[2]}"
        options = {"--best": True, "--family": family, "--save": save, "--out": folder, "--jobs": jobs}
        tune_command.run_best(
            family,
            save,
            folder,
            jobs=jobs,
            engine=DEFAULT_ENGINE,
            force=force,
            as_json=as_json,
            again=command_line("tune", options),
        )
        return
    if config is None:
        raise PrfaasError("say --config with a tuning, or --best")
    given = [*(overrides or ()), *([] if trials is None else [f"trials={trials}"])]
    loaded = load_tuning(config, given)
    where = family or loaded.family
    default = f"tune-{loaded.name}" + (f"-{where.rpartition(':')[2]}" if where else "")
    folder = out if out is not None else Path("runs") / default
    again = command_line(
        "tune",
        {
            "--config": config,
            "--family": family,
            "--trials": trials,
            "--set": overrides,
            "--out": folder,
            "--save": save,
            "--jobs": jobs,
        },
    )
    if loaded.policy is not None:
        tune_command.run_policy(
            loaded, family, folder, save=save, jobs=jobs, force=force, as_json=as_json, again=again
        )
        return
    for name, value in (("--family", family), ("--save", save)):
        if value is not None:
            raise PrfaasError(f"{name}: belongs to a tuning of a policy")
    _need((*_LEARNING, *_DRAWING), "tune of a training")
    tune_command.run_training(loaded, folder, jobs=jobs, force=force, as_json=as_json, again=again)


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a training run, or of one of its checkpoints.")],
    split: Annotated[str, typer.Option(help="What the seeds are for: test or validation.")] = "test",
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of episode seeds; default 20, or those of the training's validation."
        ),
    ] = None,
    first_seed: Annotated[
        int | None, typer.Option(help="First episode seed; default the first one of the split or validation.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Checkpoint at this step; default the run's best policy.")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option(help="Write results.csv, metrics.json and plots to this folder.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier result in --out.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a trained policy on the scenarios of its training, as its validation did, on seeds of a split."""
    _need((*_LEARNING, *_DRAWING), "evaluate")
    from prfaas_trainings import compare as comparing
    from prfaas_trainings import evaluating, results, tables
    from prfaas_trainings.episodes import default_jobs, episode_runner
    from prfaas_trainings.progress import progress_bar
    from prfaas_trainings.seeds import seeds_of

    if split not in ("test", "validation"):
        raise PrfaasError(f"--split is {split!r}; allowed: test, validation")
    named: Split = "test" if split == "test" else "validation"
    folder = evaluating.policy_folder(run, step)
    config = evaluating.config_of(folder)
    own = config.validation.seeds if named == "validation" else None
    first = first_seed if first_seed is not None or own is None else own.first
    count = seeds if seeds is not None else 20 if own is None else own.count
    chosen = seeds_of(named, first, count)
    if out is not None:
        results.check_out(out, force)
    with episode_runner(jobs or default_jobs()) as runner:
        with progress_bar("episodes", len(config.scenarios) * len(chosen)) as advance:
            found = evaluating.evaluate(
                folder, config, seeds=chosen, split=named, runner=runner, on_done=advance
            )
        if out is not None:
            results.write_comparison(found, comparing.run_timelines(found, [0], runner), out)
    if as_json:
        typer.echo(found.json_text(), nl=False)
        return
    console = tables.console_for_tables()
    tables.show(found, console)
    if out is not None:
        console.print(f"written to {out}", highlight=False, markup=False)


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


def results(
    config: Annotated[
        str, typer.Option("--config", "-c", help="Shipped configuration or path of a YAML file.")
    ] = "results",
    out: Annotated[
        Path, typer.Option(help="Folder for parts, results.json and results.md. Goes on with one there.")
    ] = Path("runs/results"),
    docs: Annotated[
        Path | None, typer.Option(help="Also write the page here, its figure to img beside it.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Make the page of this finished folder again; nothing is run."),
    ] = None,
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only this scenario, by label; may be repeated.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy, by label; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="At most this many seeds per scenario.")] = None,
    jobs: Jobs = None,
    force: Annotated[bool, typer.Option("--force", help="Start anew: remove the results in --out.")] = False,
) -> None:
    """Run every policy on every scenario of a configuration and write the page of results."""
    _need(_REPORTING, "results")
    from prfaas_trainings.parts import command_line

    if source is not None:
        from prfaas_trainings.results_page import write_page

        refused = {"--scenario": scenario, "--policy": policy, "--seeds": seeds, "--force": force}
        for name, value in {**refused, "--config": config != "results"}.items():
            if value:
                raise PrfaasError(f"{name}: has no effect with --from, which runs nothing")
        written = write_page(source, docs)
    else:
        from prfaas_trainings import results_command
        from prfaas_trainings.results_config import load_results_config

        chosen = load_results_config(config).only(scenario or (), policy or (), seeds)
        options = {
            "--config": None if config == "results" else config,
            "--out": out,
            "--docs": docs,
            "--scenario": scenario,
            "--policy": policy,
            "--seeds": seeds,
            "--jobs": jobs,
        }
        again = command_line("results", options)
        written = results_command.run(chosen, out, docs=docs, jobs=jobs, force=force, again=again)
    for path in written:
        typer.echo(f"written: {path}")


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the results; an earlier demonstration is replaced.")
    ] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(help="Time to learn, validation included.")] = 4.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: shows that everything runs.")
    ] = False,
    jobs: Jobs = None,
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
