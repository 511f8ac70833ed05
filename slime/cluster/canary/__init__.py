"""A few fixed sentences that trainer and engines score now and then: do they still hold one policy?"""
