from typing import TypedDict, type_check_only

# Kernels and build ------------------------------------------------------------------------------------------------

@type_check_only
class BuildInfo(TypedDict):
    version: str
    compiler: str
    multiversioned: bool
    cpu_level: str

def build_info() -> BuildInfo: ...
