"""Small parts that know nothing of perdure's terms: files, locks, clocks, platforms."""
