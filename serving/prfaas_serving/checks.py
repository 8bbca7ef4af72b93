"""What `prfaas serve --check` reads besides the configuration itself."""

from __future__ import annotations

from pathlib import Path

from prfaas_env.bundle import ReloadablePolicy
from prfaas_env.policy import PolicyContext
from prfaas_env.scenarios.loader import read_yaml
from prfaas_env.simulator.world import scenario_schema
from prfaas_serving.app import server_ssl
from prfaas_serving.config import Resolved, WorkersFile, validate
from prfaas_serving.length import load_tokenizer


def check_files(resolved: Resolved) -> None:
    """Read every file that a start would read.

    Raises:
        PrfaasError: the first that is missing or wrong.
    """
    config = resolved.config
    server_ssl(config.listen.tls, "listen")
    if config.admin is not None:
        server_ssl(config.admin.tls, "admin")
    if config.length.tokenizer is not None:
        load_tokenizer(config.length.tokenizer)
    if config.discovery.file is not None:
        found: WorkersFile = validate(
            WorkersFile, read_yaml(Path(config.discovery.file)), config.discovery.file
        )
        for spec in found.workers:
            resolved.check_worker(spec, config.discovery.file)
    if config.control is not None:
        context = PolicyContext(resolved.scenario, scenario_schema(resolved.scenario), config.seed)
        for policy in (config.control.policy, config.control.rule):
            ReloadablePolicy(policy).reset(context)
