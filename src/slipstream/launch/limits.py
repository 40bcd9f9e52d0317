"""Limits of the operating system that a server should not live with."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

ENOUGH_FILES = 1 << 16


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one (at most 65,536); the limit in force afterwards.

    Every stream is an open file, and the usual soft limit of 1,024 would end the clients above it one by one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            logger.warning("at most %d open files: raising the limit to %d failed (%s)", soft, wanted, error)
            return soft
        return wanted
    return soft
