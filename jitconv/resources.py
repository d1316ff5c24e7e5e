"""Where the kernel templates and the shipped cache data lie.

An installed wheel carries them inside the package::

    site-packages/jitconv/templates    site-packages/jitconv/cache

A checkout keeps them beside ``pyproject.toml``, where an editable install and a ``PYTHONPATH`` that
names the checkout find them::

    pyproject.toml    jitconv/    templates/    cache/

Nothing is read or created here, and no answer depends on the working directory.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def templates_root() -> Path:
    """Return the folder of the CUDA templates (``*.cu.j2``) and of ``device/`` and ``host/``.

    Raises:
        FileNotFoundError: the installation lost its templates; the message says what to do.
    """
    return _locate("templates", _PACKAGE)


def cache_root() -> Path:
    """Return the folder of the data shipped with jitconv: ``manifests/`` and ``tuned/``.

    This is not where compiled kernels are stored: that is ``JITCONV_CACHE_DIR``.

    Raises:
        FileNotFoundError: the installation lost its data; the message says what to do.
    """
    return _locate("cache", _PACKAGE)


def _locate(name: str, package: Path) -> Path:
    """Return the folder ``name`` of the installation whose package folder is ``package``."""
    packaged = package / name
    if packaged.is_dir():
        return packaged
    checkout = package.parent
    # Without pyproject.toml beside it, the parent is some site-packages, and a folder called
    # "templates" or "cache" there belongs to somebody else.
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise FileNotFoundError(
        f"jitconv's folder {name!r} is missing: expected {packaged} (installed package) or "
        f"{checkout / name} beside pyproject.toml (checkout). Reinstall it: "
        "pip install --force-reinstall --no-deps jitconv"
    )
