"""Hook of mkdocs: the configuration page is made from the dataclasses whenever the site is built."""

import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PRINT_PAGE = Path(__file__).with_name("config_reference")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds config.md to the pages."""
    done = subprocess.run([sys.executable, PRINT_PAGE], capture_output=True, text=True, check=True)
    files.append(File.generated(config, "config.md", content=done.stdout))
    return files
