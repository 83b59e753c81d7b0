# SPDX-License-Identifier: Apache-2.0
"""`python -m deltanet_ext demo`: a model without and with this package, inference or training."""
