"""A cluster of fake workers that speak the protocols of real ones, for tests, demonstrations and benchmarks."""
