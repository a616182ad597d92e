"""Metrics for Prometheus, traces for OpenTelemetry, and structured logs."""

from rookery.telemetry.catalogue import REGISTRY
from rookery.telemetry.exposition import MetricsServer, parse_address, render
from rookery.telemetry.metrics import Registry, Snapshot

__all__ = ["REGISTRY", "MetricsServer", "Registry", "Snapshot", "parse_address", "render"]
