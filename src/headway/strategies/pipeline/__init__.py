"""A model spread over ranks by its layers; batches pass through them in pieces."""

from headway.strategies.pipeline.splitter import ModelSplitter, create_manual_causal_lm_splitter
from headway.strategies.pipeline.strategy import PipelineStrategy

__all__ = ["ModelSplitter", "PipelineStrategy", "create_manual_causal_lm_splitter"]
