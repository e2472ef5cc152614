"""Kit's extension manager: the headless application loads few extensions by itself."""

from kit_standin.kit import KIT, require

require(__name__)


def enable_extension(extension_name: str) -> bool:
    KIT.extensions.append(extension_name)
    return True
