"""A small transformer trained through pallas_attn: model, data, training, sampling."""
