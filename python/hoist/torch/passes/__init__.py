# SPDX-License-Identifier: Apache-2.0
"""Forward and backward passes: which units they use and when, and which calls may not be made meanwhile."""
