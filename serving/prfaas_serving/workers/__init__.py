"""The project's own model worker: prefill and decode of a real hybrid class of transformers.

A worker is a process of its own (`python -m prfaas_serving.workers`) with the extra `workers`. Only `hybrid` and
`tiny_models` import torch; the rest serves any `Model`.
"""
