"""Operations that engine xla and engine jax both replace by forms XLA compiles well."""
