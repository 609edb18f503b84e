"""A decode step's latent attention in parts of the context, merged by their log-sum-exp."""
