#include "runs.hpp"
