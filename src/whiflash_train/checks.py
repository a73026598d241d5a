"""Settings are checked when they are built, in and outside tests."""

from beartype import BeartypeConf, beartype

# An int is a fine float, as it is in YAML.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
