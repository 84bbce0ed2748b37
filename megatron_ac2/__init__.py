"""megatron_ac2: actor-critic with action chunking on Megatron-Core and vLLM."""

__version__ = "0.1.0"
