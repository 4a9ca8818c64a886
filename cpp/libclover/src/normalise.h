// Unicode normalisation form C: Unicode Standard Annex 15, Hangul by section 3.12 of the standard.
#pragma once

#include <string>

namespace clover {

// text in NFC. Bytes that are not UTF-8 stay as they are.
std::string normalise_nfc(const std::string & text);

} // namespace clover
