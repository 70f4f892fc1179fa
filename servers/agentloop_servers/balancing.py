"""The balancer's settings: what a service's config says of it, and what follows from its model."""

from __future__ import annotations

from dataclasses import replace

from agentloop.scheduling.balancer import BalancerConfig
from agentloop.scheduling.step_times import FITS, StepTimes
from agentloop_servers.config import ServiceConfig, model_sizes
from agentloop_servers.engine_config import StepTimeName, StepTimeSettings

PRIOR_GROWTHS = 4  # of a trajectory, that a whole context holds: what is expected before any has ended


def balancer_config(config: ServiceConfig) -> BalancerConfig:
    """Return the settings of the balancer; those that are not given are its own."""
    settings, times, own = config.balancer, config.balancer.step_times, BalancerConfig()
    shares = own.admission
    least = shares.least if settings.min_kv_share is None else settings.min_kv_share
    most = max(shares.most, least) if settings.max_kv_share is None else settings.max_kv_share
    least = min(least, most)
    growth_tokens = min(own.priors.growth_tokens, model_sizes(config).max_context_tokens / PRIOR_GROWTHS)
    return BalancerConfig(
        lease_ttl_s=settings.lease_ttl_s,
        retention_factor=own.retention_factor if settings.retention is None else settings.retention,
        step_times=_step_times(times),
        priors=replace(own.priors, growth_tokens=growth_tokens),
        admission=replace(shares, least=least, most=most, initial=min(max(shares.initial, least), most)),
    )


def _step_times(settings: StepTimeName | StepTimeSettings) -> StepTimes:
    return FITS[settings] if isinstance(settings, str) else StepTimes(*settings.prefill, *settings.step)
