# SPDX-License-Identifier: Apache-2.0
"""Switches that make other libraries use the operators of this package."""
