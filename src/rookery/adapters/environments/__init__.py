"""Environments of other systems, unmodified: `PREFIX:NAME`, where each module defines the class of one prefix.

They run in runner processes. The policy's calls go through the attempt's recorded session, so tokens, budgets and
failures are those of Rookery's own environments. The packages of other systems are imported when an environment is
constructed. A prefix is an entry point of the group `rookery.environment_prefixes`.
"""
